//! The table itself: names, determinism, layouts.
// The short forms are allowed in test functions only; here the helpers belong to them.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::HashSet;

use paged_attention::{Case, Dtype, KvSource, NO_PAGE, Tensor};
use paged_attention_cases::{
    Alibi, Bias, BiasValues, CaseSpec, Heads, Mask, Modifiers, OptionSet, PageOrder, Poison, Pool, Seq, Sinks,
    SpecError, Values, append_page_ids, assemble, build, crossed, crossed_kernels, full, generate, loud_key, options,
    options_full, quick, write_case,
};

/// Keys and values of each sequence, wherever they lie.
fn owned(case: &Case) -> Vec<(Vec<f32>, Vec<f32>)> {
    let heads = case.geometry();
    let (k_row, v_row) =
        ((heads.kv_heads() * heads.head_dim()) as usize, (heads.kv_heads() * heads.v_head_dim()) as usize);
    match case.kv() {
        KvSource::Contiguous { k, v, kv_indptr } => {
            let (k, v) = (k.to_f32(), v.to_f32());
            kv_indptr
                .windows(2)
                .map(|w| (w[0] as usize, w[1] as usize))
                .map(|(a, b)| (k[a * k_row..b * k_row].to_vec(), v[a * v_row..b * v_row].to_vec()))
                .collect()
        }
        KvSource::Paged { k_pages, v_pages, page_indptr, page_ids, kv_len } => {
            let page = k_pages.shape()[1];
            let gather = |data: &Tensor, row: usize, seq: usize| -> Vec<f32> {
                let data = data.to_f32();
                (0..kv_len[seq] as usize)
                    .flat_map(|j| {
                        let id = page_ids[page_indptr[seq] as usize + j / page] as usize;
                        let start = (id * page + j % page) * row;
                        data[start..start + row].to_vec()
                    })
                    .collect()
            };
            (0..kv_len.len()).map(|seq| (gather(k_pages, k_row, seq), gather(v_pages, v_row, seq))).collect()
        }
    }
}

#[test]
fn names_are_unique() {
    let table: Vec<CaseSpec> = [quick(), full(), options(), options_full()].concat();
    let mut seen = HashSet::new();
    for spec in &table {
        assert!(seen.insert(spec.name.clone()), "two rows are called {}", spec.name);
    }
}

#[test]
fn every_quick_row_can_be_built() {
    for spec in quick().into_iter().chain(options()) {
        if let Err(error) = build(&spec) {
            panic!("{spec}: {error}");
        }
    }
}

#[test]
fn the_same_description_gives_the_same_case() {
    // Of the options, some: each row has the same shapes.
    for spec in quick().iter().chain(options().iter().step_by(7)).filter(|spec| spec.flops() < 1e7) {
        // Bytes, not numbers: a NaN in an unowned slot must be the same too.
        assert_eq!(format!("{:?}", build(spec).unwrap()), format!("{:?}", build(spec).unwrap()), "{spec}");
    }
}

#[test]
fn layouts_hold_the_same_rows() {
    let spec =
        CaseSpec::new("layouts", Heads::new(4, 2, 5).with_v(3), [(2, 9), (0, 4), (1, 0), (3, 16)]).dtype(Dtype::F16);
    let plain = owned(&build(&spec.clone().contiguous(Pool::new(4))).unwrap());
    for order in [PageOrder::InOrder, PageOrder::Reversed, PageOrder::Shuffled] {
        for poison in [Poison::Zero, Poison::NaN, Poison::Infinity, Poison::Mixed, Poison::Garbage] {
            for pool in [Pool::new(1), Pool::new(4).times(3), Pool::new(7).surplus(2)] {
                let spec = spec.clone().paged(pool.order(order).poison(poison));
                assert_eq!(owned(&build(&spec).unwrap()), plain, "{spec}");
            }
        }
    }
}

#[test]
fn unowned_slots_hold_the_poison() {
    let spec = CaseSpec::new("poison", Heads::new(1, 1, 8), [(1, 5)]).paged(Pool::new(4).times(3).surplus(1));
    let case = build(&spec).unwrap();
    let KvSource::Paged { k_pages, page_ids, .. } = case.kv() else { panic!("not paged") };
    assert_eq!(k_pages.shape(), [9, 4, 1, 8]);
    assert_eq!(page_ids.len(), 3);
    assert_eq!(k_pages.to_f32().iter().filter(|x| x.is_nan()).count(), (9 * 4 - 5) * 8);
}

#[test]
fn shared_pages_are_the_same_pages() {
    let seqs = [0, 1, 0, 1].map(|kv_stream| Seq { q_len: 1, kv_len: 10, q_stream: kv_stream + 9, kv_stream }).to_vec();
    let spec = CaseSpec::new("shared", Heads::new(1, 1, 8), []).seqs(seqs).paged(Pool::new(4).shared().times(1));
    let case = build(&spec).unwrap();
    let KvSource::Paged { page_ids, k_pages, .. } = case.kv() else { panic!("not paged") };
    assert_eq!(k_pages.shape()[0], 6);
    assert_eq!(page_ids[0..6], page_ids[6..12]);
    let rows = owned(&case);
    assert_eq!(rows[0], rows[2]);
    assert_ne!(rows[0], rows[1]);
}

#[test]
fn a_sequence_does_not_depend_on_its_neighbours() {
    let all = CaseSpec::new("batch", Heads::new(2, 1, 8), [(3, 9), (1, 20), (4, 4)]);
    let alone = all.clone().seqs(vec![all.seqs[1]]);
    assert_eq!(generate(&all).unwrap()[1], generate(&alone).unwrap()[0]);
}

const MODIFIERS: Modifiers = Modifiers {
    window_left: Some(7),
    window_right: Some(2),
    softcap: Some(20.0),
    alibi: Some(Alibi::Mixed),
    sinks: Some(Sinks::Within(10.0)),
    mask: Some(Mask::Random(70)),
    bias: Some(Bias { per_head: true, dtype: Dtype::F16, values: BiasValues::Hiding(20) }),
};

/// Mask and bias of a sequence are its own, wherever it is in a batch, and those of a chunk are a part of the whole's.
#[test]
fn masks_and_biases_go_with_their_sequence() {
    let all = CaseSpec::new("batch", Heads::new(2, 1, 8), [(3, 9), (0, 5), (2, 0), (4, 20)]).modified(MODIFIERS);
    let case = build(&all).unwrap();
    let (entries, sequences) = (3 * 9 + 4 * 20, generate(&all).unwrap());
    assert_eq!(case.score_indptr(), [0, 27, 27, 27, entries as u64]);
    let extras = case.extras();
    assert_eq!(extras.bias.as_ref().unwrap().shape(), [2, entries]);
    assert_eq!(extras.mask.as_ref().unwrap().len(), entries);
    assert_eq!((extras.alibi_slopes.as_ref().unwrap().len(), extras.sinks.as_ref().unwrap().len()), (2, 2));
    for row in 0..4 {
        let whole = sequences[3].clone();
        assert_eq!(case.mask_row(3, row).unwrap(), &whole.mask.as_ref().unwrap()[row as usize * 20..][..20]);
        for head in 0..2 {
            let own = &whole.bias.as_ref().unwrap()[(head * 4 + row as usize) * 20..][..20];
            // The bias is rounded to f16.
            let own = Tensor::from_f32(Dtype::F16, &[20], own).unwrap().to_f32();
            assert_eq!(case.bias_row(3, row, head).unwrap(), own);
        }
    }
    assert_eq!((case.mask_row(3, 4), case.mask_row(4, 0), case.mask_row(1, 0)), (None, None, None));
    assert_eq!((case.bias_row(3, 4, 0), case.bias_row(3, 0, 2)), (None, None));
    assert_eq!(case.mask_row(2, 1), Some(&[][..]));
    let alone = all.clone().seqs(vec![all.seqs[3]]);
    assert_eq!(generate(&alone).unwrap()[0], sequences[3]);
    // Rows 1 and 2 over the first 18 keys.
    let chunk = sequences[3].chunk(&all.heads, 1, 3, 18);
    let part = build(&all).and_then(|_| assemble(&all, &[chunk])).unwrap();
    for (row, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        assert_eq!(part.mask_row(0, row).unwrap(), &case.mask_row(3, row + 1).unwrap()[..18]);
        assert_eq!(part.bias_row(0, row, head).unwrap(), case.bias_row(3, row + 1, head).unwrap()[..18]);
    }
}

/// Rows of a mask as text.
fn drawn(mask: Mask, lengths: (u32, u32)) -> Vec<String> {
    let modifiers = Modifiers { mask: Some(mask), ..Modifiers::NONE };
    let case = build(&CaseSpec::new("mask", Heads::new(1, 1, 8), [lengths]).modified(modifiers).seed(3)).unwrap();
    let row = |row| case.mask_row(0, row).unwrap().iter().map(|sees| if *sees { 'x' } else { '.' }).collect();
    (0..lengths.0).map(row).collect()
}

#[test]
fn masks_are_what_they_are_called() {
    assert_eq!(drawn(Mask::Causal, (3, 5)), ["xxx..", "xxxx.", "xxxxx"]);
    assert_eq!(drawn(Mask::Causal, (3, 1)), [".", ".", "x"]);
    assert_eq!(drawn(Mask::Prefix(2), (4, 4)), ["xx..", "xx..", "xxx.", "xxxx"]);
    assert_eq!(drawn(Mask::Nothing, (2, 3)), ["...", "..."]);
    assert_eq!(drawn(Mask::Everything, (2, 3)), ["xxx", "xxx"]);
    for row in drawn(Mask::Blocks(4), (8, 20)).chunks(4) {
        assert!(row.iter().all(|line| *line == row[0]), "{row:?}");
        assert!(row[0].as_bytes().chunks(4).all(|block| block.iter().all(|mark| *mark == block[0])), "{row:?}");
    }
    // Every node sees the prompt, itself, and of its ancestors what they see.
    let tree = drawn(Mask::Tree, (12, 20));
    for (node, row) in tree.iter().enumerate() {
        let (prompt, nodes) = row.split_at(8);
        assert_eq!(prompt, "xxxxxxxx");
        assert_eq!(&nodes[node..=node], "x");
        assert!(!nodes[node + 1..].contains('x'), "{row}");
        if let Some(parent) = nodes[..node].rfind('x') {
            assert_eq!(nodes[..node], tree[parent][8..8 + node], "{node} and its parent {parent}");
        }
    }
    let branches = (1..12).filter(|node| &tree[*node][8 + node - 1..8 + node] == ".").count();
    assert!(branches > 0, "a chain is no tree: {tree:?}");
    let share = drawn(Mask::Random(30), (40, 50)).concat().matches('x').count();
    assert!((500..700).contains(&share), "{share}");
}

#[test]
fn a_shared_prefix_is_the_same_pages() {
    let spec = CaseSpec::new("prefix", Heads::new(2, 1, 8), [(1, 12), (2, 11), (1, 5), (1, 12)])
        .shared_prefix(9)
        .paged(Pool::new(4).times(1));
    let case = build(&spec).unwrap();
    let KvSource::Paged { page_ids, page_indptr, k_pages, .. } = case.kv() else { panic!("not paged") };
    // Two full pages are shared; the third has one token of the prefix, and the short sequence has one page of two.
    assert_eq!(page_indptr, &[0, 3, 6, 8, 11]);
    let table = |seq: usize| &page_ids[page_indptr[seq] as usize..page_indptr[seq + 1] as usize];
    assert_eq!(table(0)[..2], table(1)[..2]);
    assert_eq!(table(0)[..2], table(3)[..2]);
    assert_eq!(table(0)[0], table(2)[0]);
    assert_eq!(page_ids.iter().collect::<HashSet<_>>().len(), 2 + 4);
    assert_eq!(k_pages.shape()[0], 6);
    let rows = owned(&case);
    assert_eq!(rows[0].0[..9 * 8], rows[3].0[..9 * 8]);
    assert_ne!(rows[0].0[9 * 8..], rows[3].0[9 * 8..]);
    // Contiguous, the same tokens.
    assert_eq!(owned(&build(&spec.clone().contiguous(Pool::new(4))).unwrap()), rows);
    // Tokens that differ cannot be shared.
    let mut sequences = generate(&spec).unwrap();
    sequences[1].k[3] += 1.0;
    assert!(matches!(assemble(&spec, &sequences), Err(SpecError::Prefix { seq: 1, tensor: "k", tokens: 8 })));
}

/// The drawn cases are legal, the same for a seed, and meet every option, on and off together with every other.
#[test]
fn crossed_cases_meet_every_pair_of_options() {
    let kernels = crossed_kernels();
    for (index, kernel) in kernels.iter().enumerate() {
        assert!(!kernels[..index].contains(kernel), "{kernel:?} twice");
    }
    let flags =
        |set: &OptionSet| [set.window, set.softcap, set.alibi, set.sinks, set.mask, set.bias.is_some(), set.shared];
    for (seed, kernel) in (0..300).zip(kernels.iter().cycle()) {
        let drawn = crossed(kernel, seed);
        let m = drawn.spec.modifiers;
        if let Err(error) = drawn.build() {
            panic!("{drawn:?}: {error}");
        }
        assert_eq!(drawn, crossed(kernel, seed));
        let has = OptionSet {
            window: m.window_left.is_some(),
            softcap: m.softcap.is_some(),
            alibi: m.alibi.is_some(),
            sinks: m.sinks.is_some(),
            mask: m.mask.is_some(),
            bias: m.bias.map(|bias| bias.dtype),
            shared: !drawn.prefixes.is_empty(),
        };
        assert_eq!(has, kernel.options, "{drawn:?}");
    }
    for (a, b) in (0..7).flat_map(|a| (0..a).map(move |b| (a, b))) {
        let seen: HashSet<_> =
            kernels.iter().map(|kernel| (flags(&kernel.options)[a], flags(&kernel.options)[b])).collect();
        assert_eq!(seen.len(), 4, "options {a} and {b}, each on and off: {seen:?}");
    }
    for first in 0..3 {
        for option in 0..7 {
            let turns = kernels.iter().skip(first).step_by(3).map(|kernel| flags(&kernel.options)[option]);
            assert_eq!(turns.collect::<HashSet<_>>().len(), 2, "option {option} in every third kernel from {first} on");
        }
    }
}

#[test]
fn pages_that_no_row_sees_can_be_withheld() {
    let window = Modifiers { window_left: Some(5), ..Modifiers::NONE };
    // Row 0 of the first sees keys 9 .. 15; of the third keys of page 0 on; nobody looks at the second.
    let spec = CaseSpec::new("withheld", Heads::new(1, 1, 8), [(3, 17), (0, 9), (2, 6)]).causal(true).modified(window);
    let ids = |pool: Pool| {
        let case = build(&spec.clone().paged(pool)).unwrap();
        let KvSource::Paged { page_ids, .. } = case.kv().clone() else { panic!("not paged") };
        (case, page_ids)
    };
    let ((whole, all), (part, left)) = (ids(Pool::new(4).surplus(1)), ids(Pool::new(4).surplus(1).withheld()));
    let missing: Vec<usize> = (0..left.len()).filter(|entry| left[*entry] == NO_PAGE).collect();
    // Pages of 4: entries 0 and 1 of 5 and a spare one; all 3 of the next.
    assert_eq!(missing, [0, 1, 6, 7, 8]);
    assert!(all.iter().zip(&left).all(|(all, left)| all == left || *left == NO_PAGE));
    let kv = |case: &Case, seq| case.sequence_kv(seq).unwrap();
    assert_eq!(kv(&part, 0).k(0)[8 * 8..], kv(&whole, 0).k(0)[8 * 8..]);
    assert_eq!(kv(&part, 0).v(0)[..8 * 8], [0.0; 64]);
    assert_eq!(kv(&part, 2), kv(&whole, 2));
}

#[test]
fn append_pages_are_distinct_and_in_the_pool() {
    let spec = CaseSpec::new("append", Heads::new(1, 1, 8), [(1, 9), (1, 3)]).contiguous(Pool::new(4).times(5));
    let ids = append_page_ids(&spec).unwrap();
    assert_eq!(ids.len(), 4);
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 4);
    assert!(ids.iter().all(|id| *id < 20));
}

/// Scores of one sequence in f64, from the case's own tensors: `[row][head][key]`.
fn scores(spec: &CaseSpec) -> Vec<Vec<Vec<f64>>> {
    let case = build(&spec.clone().contiguous(Pool::new(16))).unwrap();
    let (q, k) = (case.q().to_f32(), owned(&case).remove(0).0);
    let heads = spec.heads;
    let dim = heads.head_dim as usize;
    let dot = |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum() };
    q.chunks(dim * heads.q_heads as usize)
        .map(|row| {
            row.chunks(dim)
                .enumerate()
                .map(|(head, q)| {
                    let kv_head = head / (heads.q_heads / heads.kv_heads) as usize;
                    k.chunks(dim * heads.kv_heads as usize)
                        .map(|key| case.options().scale * dot(q, &key[kv_head * dim..(kv_head + 1) * dim]))
                        .collect()
                })
                .collect()
        })
        .collect()
}

#[test]
fn needles_take_all_of_the_weight() {
    const KEYS: &[u32] = &[0, 7, 299, 5];
    for (causal, heads) in [(false, Heads::new(4, 2, 64)), (true, Heads::new(2, 2, 128))] {
        for keys in [KEYS, &[]] {
            let spec = CaseSpec::new("needles", heads, [(6, 300)])
                .dtype(Dtype::F16)
                .causal(causal)
                .values(Values::Needles { keys });
            for (row, heads) in scores(&spec).into_iter().enumerate() {
                let seen = if causal { 295 + row } else { 300 };
                let group = heads.len() / spec.heads.kv_heads as usize;
                for (head, scores) in heads.into_iter().enumerate() {
                    let index = row * group + head % group;
                    let sought = keys.get(index % keys.len().max(1)).map_or(index, |key| *key as usize).min(seen - 1);
                    let others = scores[..seen].iter().enumerate().filter(|(key, _)| *key != sought);
                    let others: f64 = others.map(|(_, score)| (score - scores[sought]).exp()).sum();
                    assert!(others < 1e-10, "{spec}: row {row}, head {head}: {others:e} beside key {sought}");
                }
            }
        }
    }
}

#[test]
fn reversed_pools_are_used_at_their_end() {
    for spec in quick().iter().filter(|spec| spec.name.ends_with("70000-pages-paged")) {
        let case = build(spec).unwrap();
        let KvSource::Paged { page_ids, .. } = case.kv() else { panic!("not paged") };
        assert!(page_ids.len() == 100 && page_ids.iter().all(|id| *id > 65_536), "{page_ids:?}");
    }
}

#[test]
fn equal_scores_are_equal_and_near_their_level() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for level in [0.0, 1e4, -1e4, -5e4, 6e4, -6e4, -1e5, 2.45e5, -2.45e5, -3e37] {
            if dtype == Dtype::F16 && level == -3e37 {
                continue;
            }
            let spec = CaseSpec::new("equal", Heads::new(4, 2, 64), [(3, 20)])
                .dtype(dtype)
                .values(Values::EqualScores { level });
            for row in scores(&spec).iter().flatten() {
                assert!((row[0] - level).abs() <= 0.01 * level.abs(), "{spec}: {}", row[0]);
                assert!(row.iter().all(|s| s.to_bits() == row[0].to_bits()), "{spec}");
            }
        }
    }
}

#[test]
fn one_key_lies_above_by_the_lead() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let values = Values::OneAbove { level: -1e5, lead: 1024.0 };
        let spec = CaseSpec::new("above", Heads::new(4, 2, 64), [(3, 20)]).dtype(dtype).values(values);
        for row in scores(&spec).iter().flatten() {
            let loud = loud_key(20) as usize;
            assert!((row[loud] - row[0] - 1024.0).abs() < 1e-9, "{spec}: {}", row[loud] - row[0]);
            assert!(row.iter().enumerate().all(|(j, s)| j == loud || *s == row[0]), "{spec}");
        }
    }
}

#[test]
fn a_written_case_has_every_tensor() {
    let spec =
        CaseSpec::new("file", Heads::new(2, 1, 8), [(2, 9)]).dtypes(Dtype::F16, Dtype::Bf16).causal(true).scale(0.1);
    let modified = spec.clone().contiguous(Pool::new(4)).modified(MODIFIERS);
    for (spec, needed) in [
        (
            spec.clone().paged(Pool::new(4)),
            vec!["k_pages", "kv_len", "page_ids", "page_indptr", "q", "q_indptr", "v_pages"],
        ),
        (spec.contiguous(Pool::new(4)), vec!["k", "kv_indptr", "q", "q_indptr", "v"]),
        (modified, vec!["alibi_slopes", "bias", "k", "kv_indptr", "mask", "q", "q_indptr", "sinks", "v"]),
    ] {
        let case = build(&spec).unwrap();
        let path =
            std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("table-{}.safetensors", needed.len()));
        write_case(&case, &path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut names = file.names();
        names.sort_unstable();
        assert_eq!(names, needed);
        assert_eq!(file.tensor("q").unwrap().data(), case.q().bytes());
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = header.metadata().clone().unwrap();
        assert_eq!(metadata["causal"], "true");
        assert_eq!(metadata["scale"].parse::<f64>().unwrap(), 0.1);
        let found = ["window_left", "window_right", "softcap"].map(|key| metadata.get(key).map(String::as_str));
        let extras = needed.contains(&"bias");
        assert_eq!(found, if extras { [Some("7"), Some("2"), Some("2e1")] } else { [None; 3] });
        if extras {
            let bytes = |name| file.tensor(name).unwrap().data().to_vec();
            let mask: Vec<u8> = case.extras().mask.iter().flatten().map(|sees| u8::from(*sees)).collect();
            assert_eq!(bytes("mask"), mask);
            assert_eq!(bytes("bias"), case.extras().bias.as_ref().unwrap().bytes());
        }
    }
}
