//! The table itself: names, determinism, layouts.
// The short forms are allowed in test functions only; here the helpers belong to them.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::HashSet;

use paged_attention::{Case, Dtype, KvSource, Tensor};
use paged_attention_cases::{
    CaseSpec, Heads, PageOrder, Poison, Pool, Seq, Values, append_page_ids, build, full, generate, loud_key, quick,
    write_case,
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
    let table: Vec<CaseSpec> = quick().into_iter().chain(full()).collect();
    let mut seen = HashSet::new();
    for spec in &table {
        assert!(seen.insert(spec.name.clone()), "two rows are called {}", spec.name);
    }
}

#[test]
fn every_quick_row_can_be_built() {
    for spec in quick() {
        if let Err(error) = build(&spec) {
            panic!("{spec}: {error}");
        }
    }
}

#[test]
fn the_same_description_gives_the_same_case() {
    for spec in quick().iter().filter(|spec| spec.flops() < 1e7) {
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
    for (spec, needed) in [
        (
            spec.clone().paged(Pool::new(4)),
            vec!["k_pages", "kv_len", "page_ids", "page_indptr", "q", "q_indptr", "v_pages"],
        ),
        (spec.contiguous(Pool::new(4)), vec!["k", "kv_indptr", "q", "q_indptr", "v"]),
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
    }
}
