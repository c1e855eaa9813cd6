//! Faults that attention kernels have had elsewhere (numbers as in the project's list of them): each test runs the real
//! kernel, then the same kernel with that fault put into its source, and fails unless the first is right and the second
//! is noticed; every kernel variant has its turn.

mod adapters;
mod arithmetic;
mod limits;
mod places;
mod segments;
mod shared_prefixes;
mod stored;
mod subgroups;

use std::collections::HashSet;
use std::num::NonZeroU32;

use paged_attention::kernels::{
    AdapterFacts, DecodeVariant, KernelConfig, KernelId, Kernels, LANES, SPLIT_KEYS, SourceEdit, Tiles, Variants,
};
use paged_attention::{
    Batch, BatchError, BindError, BuildError, Case, CaseExtras, Computed, Dtype, HeadGeometry, KvLayout, KvSource,
    LayoutError, Modifiers, Output, PageSize, RunError, RunOptions, Runner, StatusError, verify, wgpu,
};
use paged_attention_cases::{CaseSpec, Heads, Poison, Pool, Values, build};

use crate::common::{Gpu, difference, gpu, judge, run_options, say, shortened};

const ATTENTION: [KernelId; 3] = [KernelId::Prefill, KernelId::Decode, KernelId::Merge];

/// Small heads: each mutant is a compilation of its own.
const HEADS: Heads = Heads::new(4, 2, 8);

fn edit(kernel: KernelId, from: &'static str, to: &'static str) -> SourceEdit {
    SourceEdit { kernel, from, to }
}

/// An edit with texts that are made for a variant.
fn edit_text(kernel: KernelId, from: String, to: String) -> SourceEdit {
    // As long as the process: tests are few, and edits are `Copy`.
    edit(kernel, Box::leak(from.into_boxed_str()), Box::leak(to.into_boxed_str()))
}

/// The same edit in every kernel that shares the text.
fn shared(from: &'static str, to: &'static str) -> Vec<SourceEdit> {
    ATTENTION.into_iter().map(|kernel| edit(kernel, from, to)).collect()
}

/// The variants that need no subgroups, as a CPU gets them.
fn base(geometry: &HeadGeometry) -> Variants {
    Variants::base(&AdapterFacts::PLAIN_CPU, geometry)
}

fn base_options(spec: &CaseSpec) -> RunOptions {
    with_variants(spec, base(&spec.heads.geometry().unwrap()))
}

fn with_variants(spec: &CaseSpec, variants: Variants) -> RunOptions {
    RunOptions { variants: Some(variants), ..run_options(spec) }
}

/// `spec` once for every variant that is tested here.
fn in_every_variant(gpu: &Gpu, spec: &CaseSpec) -> Vec<RunOptions> {
    let variants = gpu.every_variant(&spec.heads.geometry().unwrap());
    variants.into_iter().map(|variants| with_variants(spec, variants)).collect()
}

fn kernel_config(case: &Case, options: &RunOptions) -> KernelConfig {
    options.kernels(case, options.variants.unwrap())
}

/// Runs `case` with edited kernels.
fn run_edited(
    runner: &mut Runner,
    case: &Case,
    options: &RunOptions,
    edits: &[SourceEdit],
) -> Result<Output, RunError> {
    let config = kernel_config(case, options);
    let kernels = pollster::block_on(Kernels::with_edits(runner.device(), &config, edits))?;
    runner.insert_kernels(kernels);
    runner.run(case, options)
}

/// The real kernels pass `spec`; those with `edits` do not, in any variant.
fn noticed(gpu: &Gpu, fault: &str, spec: &CaseSpec, edits: &[SourceEdit]) {
    noticed_in(gpu, fault, spec, |_| edits.to_vec(), judged);
}

/// The same with edits of texts that only some variants have.
fn noticed_by_variant(gpu: &Gpu, fault: &str, spec: &CaseSpec, edits: impl Fn(&KernelConfig) -> Vec<SourceEdit>) {
    noticed_in(gpu, fault, spec, edits, judged);
}

fn judged(case: &Case, _: &Output, output: &Output) -> Result<(), String> {
    judge(case, output).map(|_| ())
}

/// `check` sees the case, the real output and the one to be judged, and says how a fault shows. A mutant that cannot
/// be built is noticed by nobody: an edit that does not apply, or that breaks the shader, fails the test.
fn noticed_in(
    gpu: &Gpu,
    fault: &str,
    spec: &CaseSpec,
    edits: impl Fn(&KernelConfig) -> Vec<SourceEdit>,
    check: impl Fn(&Case, &Output, &Output) -> Result<(), String>,
) {
    noticed_case(gpu, fault, spec, &build(spec).unwrap(), edits, check);
}

/// The same for a case that differs from its description in its values.
fn noticed_case(
    gpu: &Gpu,
    fault: &str,
    spec: &CaseSpec,
    case: &Case,
    edits: impl Fn(&KernelConfig) -> Vec<SourceEdit>,
    check: impl Fn(&Case, &Output, &Output) -> Result<(), String>,
) {
    noticed_with(gpu, fault, (spec, case), |options| options, edits, check);
}

/// The same with other options than the description has.
fn noticed_with(
    gpu: &Gpu,
    fault: &str,
    (spec, case): (&CaseSpec, &Case),
    options: impl Fn(RunOptions) -> RunOptions,
    edits: impl Fn(&KernelConfig) -> Vec<SourceEdit>,
    check: impl Fn(&Case, &Output, &Output) -> Result<(), String>,
) {
    let mut seen = HashSet::new();
    for options in in_every_variant(gpu, spec).into_iter().map(options) {
        let config = kernel_config(case, &options);
        let edits = edits(&config);
        let (fault, spec) = (format!("{fault}, {} {}", config.variants.prefill, config.variants.decode), &spec);
        let kernels: Vec<_> = KernelId::ALL.into_iter().filter(|id| edits.iter().any(|e| e.kernel == *id)).collect();
        // Kernels without variants need one turn.
        let texts: Vec<String> = kernels.iter().map(|kernel| kernel.wgsl(&config).unwrap()).collect();
        let told: Vec<_> = edits.iter().map(|e| (e.from, e.to)).collect();
        if !seen.insert((texts, told)) {
            continue;
        }
        let real = gpu.run(case, &options).unwrap_or_else(|error| panic!("{fault}: {spec}: {error}"));
        if let Err(why) = check(case, &real, &real) {
            panic!("{fault}: the real kernel fails {spec}: {why}");
        }
        let why = match run_edited(&mut gpu.fresh_runner(), case, &options, &edits) {
            Err(RunError::Build(error)) => panic!("{fault}: there is no mutant: {error}"),
            Err(error) => error.to_string(),
            Ok(output) => match check(case, &real, &output) {
                Err(why) => why,
                Ok(()) => panic!("{fault}: nobody notices the mutant in {spec}"),
            },
        };
        say(&format!("{fault}: noticed: {}", shortened(&why)));
    }
}

/// A mutant of every variant, by what its run says.
fn refused_in(
    gpu: &Gpu,
    spec: &CaseSpec,
    edits: impl Fn(&KernelConfig) -> Vec<SourceEdit>,
    expected: impl Fn(&RunError) -> bool,
) {
    let case = build(spec).unwrap();
    for options in in_every_variant(gpu, spec) {
        let edits = edits(&kernel_config(&case, &options));
        match run_edited(&mut gpu.fresh_runner(), &case, &options, &edits) {
            Err(error) if expected(&error) => {}
            Err(error) => panic!("{spec}: {error}"),
            Ok(_) => panic!("{spec}: the mutant ran"),
        }
    }
}

fn prefill(name: &str) -> CaseSpec {
    CaseSpec::new(format!("faults/{name}"), HEADS, [(40, 75)]).paged(Pool::new(4))
}

/// Two splits and a bit.
fn decode(name: &str) -> CaseSpec {
    CaseSpec::new(format!("faults/{name}"), HEADS, [(1, 2 * SPLIT_KEYS + 37)]).paged(Pool::new(4))
}

fn both(name: &str) -> [CaseSpec; 2] {
    [prefill(name), decode(name)]
}

#[test]
fn fault_01_a_sentinel_that_real_scores_lie_below() {
    let Some(gpu) = gpu() else { return };
    for spec in both("01") {
        let spec = spec.values(Values::EqualScores { level: -1e5 });
        noticed(gpu, "01", &spec, &shared("const NO_SCORE = -8.507059173023462e37;", "const NO_SCORE = -5e4;"));
    }
}

/// Running maxima that start from a true infinity, in kernels that do not mind what they subtract.
fn from_minus_infinity(kernel: KernelId) -> [SourceEdit; 5] {
    // What a constant may not be, a uniform value can.
    let minus_infinity = "bitcast<f32>(0xff800000u + params.kv_heads - params.kv_heads)";
    [
        edit(kernel, "const EMPTY_ROW = RowState(NO_SCORE, 0.0);", ""),
        edit(kernel, "EMPTY_ROW", "RowState(NO_SCORE, 0.0)"),
        edit(kernel, "const NO_SCORE = -8.507059173023462e37;", ""),
        edit(kernel, "NO_SCORE", minus_infinity),
        edit(kernel, "select(exp2(s - m), 1.0, s == m)", "exp2(s - m)"),
    ]
}

#[test]
fn fault_02_a_true_infinity_as_running_maximum() {
    let Some(gpu) = gpu() else { return };
    let edits = from_minus_infinity(KernelId::Prefill);
    // The first rows see no key.
    noticed(gpu, "02", &CaseSpec::new("faults/02", HEADS, [(40, 30)]).causal(true), &edits);
}

/// The same fault where two empty states meet: a prompt whose keys are split, and whose first rows see none of them.
/// Merges are partitions of the keys: any partition stays inside the bound, and empty with empty stays empty.
#[test]
fn fault_02_two_empty_states_are_merged() {
    let Some(gpu) = gpu() else { return };
    let spec = CaseSpec::new("faults/02-merge", HEADS, [(90, 70), (20, 130), (40, 0)]).causal(true).paged(Pool::new(4));
    let case = build(&spec).unwrap();
    let plain = base_options(&spec);
    let split = |split_keys| {
        let mut options = plain.clone();
        options.variants.as_mut().unwrap().prefill.split_keys = split_keys;
        options
    };
    for split_keys in [2, 4, 6, 16, 26, 64, 70, 128] {
        let output = gpu.run(&case, &split(split_keys)).unwrap();
        judge(&case, &output).unwrap_or_else(|why| panic!("splits of {split_keys}: {why}"));
        assert!(output.kernels.iter().any(|used| used.kernel == "merge"), "splits of {split_keys}");
    }
    let kernel = KernelId::Merge;
    let loaded = "return RowState(select(words.x, NO_SCORE, words.y == 0.0), words.y);";
    let mut edits =
        vec![edit(kernel, "if has_seen(part) {", "{"), edit(kernel, "return RowState(words.x, words.y);", loaded)];
    edits.extend(from_minus_infinity(kernel));
    let mutant = run_edited(&mut gpu.fresh_runner(), &case, &split(16), &edits).unwrap();
    let why = judge(&case, &mutant).unwrap_err();
    say(&format!("02, merge: noticed: {}", shortened(&why)));
}

#[test]
fn fault_03_rows_that_see_no_key() {
    let Some(gpu) = gpu() else { return };
    let edits = shared("        select(0.0, 1.0 / l, has_seen(row)),", "        1.0 / row.l,");
    for lengths in [(40, 30), (5, 2), (1, 0), (64, 0)] {
        noticed(gpu, "03", &CaseSpec::new("faults/03", HEADS, [lengths]).causal(true), &edits);
    }
}

#[test]
fn fault_04_the_sum_of_an_empty_row() {
    let Some(gpu) = gpu() else { return };
    let edits = shared("select(NEGATIVE_INFINITY_BITS, bitcast<u32>(value), has_seen(row))", "bitcast<u32>(value)");
    for lengths in [(40, 30), (5, 2), (1, 0)] {
        noticed(gpu, "04", &CaseSpec::new("faults/04", HEADS, [lengths]).causal(true), &edits);
    }
}

#[test]
fn fault_05_logarithms_of_two_bases() {
    let Some(gpu) = gpu() else { return };
    for spec in both("05") {
        noticed(gpu, "05 result", &spec, &shared("const LN_2 = 0.6931471805599453;", "const LN_2 = 1.0;"));
    }
    let edits =
        [edit(KernelId::Merge, "return RowState(words.x, words.y);", "return RowState(words.x * LN_2, words.y);")];
    noticed(gpu, "05 merge", &decode("05"), &edits);
}

#[test]
fn fault_06_unowned_slots_reach_the_output() {
    let Some(gpu) = gpu() else { return };
    for poison in [Poison::NaN, Poison::Infinity, Poison::Mixed] {
        // 75 keys: the last page of 4 has a tail, the last step of the kernel as well.
        let spec = prefill("06").paged(Pool::new(4).poison(poison));
        let edits = [edit(KernelId::Prefill, "< key_end - key_begin - 1u);", "< key_end - key_begin + 7u);")];
        noticed(gpu, "06 prefill", &spec, &edits);
        // The same for a decode, with the weight of the slots past the end zero.
        let spec = decode("06").paged(Pool::new(16).poison(poison));
        noticed_by_variant(gpu, "06 decode", &spec, |config| {
            let mut edits = vec![
                ("key < keys; key += DECODE_LANES", "key < keys + 3u; key += DECODE_LANES"),
                ("key < keys; key += PARTS", "key < keys + 3u; key += PARTS"),
            ];
            edits.extend(match config.variants.decode {
                DecodeVariant::Streams { .. } => {
                    vec![("clamp(turn + lane, first, keys - 1u)", "clamp(turn + lane, first, keys + 2u)")]
                }
                _ => vec![("turn < keys; turn += KEY_STREAMS", "turn < keys + 3u; turn += KEY_STREAMS")],
            });
            edits.into_iter().map(|(from, to)| edit(KernelId::Decode, from, to)).collect()
        });
    }
}

#[test]
fn fault_07_blanking_by_multiplying_with_zero() {
    let Some(gpu) = gpu() else { return };
    // The runner fills the padding of rows with NaN. Dimension 5: three elements of it in every row.
    let heads = Heads::new(2, 2, 5);
    // (Drivers turn a product with a constant zero into that zero; this one they cannot see.)
    let edits = shared(
        "return select(vec4<u32>(0u), words, vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(dim));",
        "let owned = vec4<f32>(f32(dim) - f32(first + params.bias_head_stride)) - vec4<f32>(0.0, 1.0, 2.0, 3.0); \
         return bitcast<vec4<u32>>(bitcast<vec4<f32>>(words) * clamp(owned, vec4<f32>(0.0), vec4<f32>(1.0)));",
    );
    for lengths in [(40, 40), (1, 40)] {
        noticed(gpu, "07", &CaseSpec::new("faults/07", heads, [lengths]), &edits);
    }
    // And a comparator that lets NaN pass would hide it.
    let spec = prefill("07");
    let case = build(&spec).unwrap();
    let mut output = gpu.run(&case, &base_options(&spec)).unwrap();
    output.out[17] = f32::NAN;
    let computed = Computed { out: &output.out, lse: &output.lse, out_dtype: output.out_dtype, chains: &output.chains };
    assert!(!verify(&case, &computed).unwrap().passed());
}

#[test]
fn fault_08_a_loop_that_steps_over_keys() {
    let Some(gpu) = gpu() else { return };
    let edits = [edit(KernelId::Prefill, "step += ", "step += 1u + ")];
    noticed(gpu, "08 prefill", &prefill("08"), &edits);
    // Places, scores and values.
    let decode_edits = |config: &KernelConfig| match config.variants.decode {
        DecodeVariant::Workgroup => [
            (
                "key < keys; key += DECODE_LANES) {\n        if key >= first {\n            let page",
                "key < keys; key += DECODE_LANES + 1u) {\n        if key >= first {\n            let page",
            ),
            (
                "key < keys; key += DECODE_LANES) {\n        let k_row",
                "key < keys; key += DECODE_LANES + 1u) {\n        let k_row",
            ),
            ("turn < keys; turn += KEY_STREAMS", "turn < keys; turn += KEY_STREAMS + 1u"),
        ],
        DecodeVariant::Streams { .. } => [
            ("key < keys; key += DECODE_LANES", "key < keys; key += DECODE_LANES + 1u"),
            ("i < SPLIT_KEYS / DECODE_SUBGROUP &&", "i + 1u < SPLIT_KEYS / DECODE_SUBGROUP &&"),
            ("turn += DECODE_SUBGROUP)", "turn += DECODE_SUBGROUP + 1u)"),
        ],
        DecodeVariant::Exchange { .. } => [
            ("key < keys; key += DECODE_LANES", "key < keys; key += DECODE_LANES + 1u"),
            ("turn += TURN)", "turn += TURN + 1u)"),
            ("turn < keys; turn += KEY_STREAMS", "turn < keys; turn += KEY_STREAMS + 1u"),
        ],
    };
    for i in 0..3 {
        noticed_by_variant(gpu, "08 decode", &decode("08"), |config| {
            let (from, to) = decode_edits(config)[i];
            vec![edit(KernelId::Decode, from, to)]
        });
    }
}

/// On N(0, 1), dimension 64, 64 keys: what would be right on f16 hardware without telling is outside the bound.
#[test]
fn fault_11_arithmetic_in_f16() {
    let Some(gpu) = gpu() else { return };
    let heads = Heads::new(2, 2, 64);
    let rounded = "unpack2x16float(pack2x16float(vec2<f32>(";
    for (what, from, to) in [
        ("scores", "return fma(a.hi.w, b.hi.w, s);", format!("return {rounded}fma(a.hi.w, b.hi.w, s), 0.0))).x;")),
        (
            "weights",
            "return select(exp2(s - m), 1.0, s == m);",
            format!("return {rounded}select(exp2(s - m), 1.0, s == m), 0.0))).x;"),
        ),
    ] {
        let to: &'static str = Box::leak(to.into_boxed_str());
        for (kernel, lengths) in [(KernelId::Prefill, vec![(64, 64)]), (KernelId::Decode, vec![(1, 64); 24])] {
            let spec = CaseSpec::new("faults/11", heads, lengths).seed(21);
            noticed(gpu, &format!("11 {what}, {}", kernel.entry_point()), &spec, &[edit(kernel, from, to)]);
        }
    }
}

#[test]
fn fault_12_more_workgroups_than_an_axis_holds() {
    let Some(gpu) = gpu() else { return };
    let lengths: Vec<_> = (0..40).map(|i| if i % 3 == 0 { (20, 20 + i) } else { (1, 1 + 9 * i) }).collect();
    let spec = CaseSpec::new("faults/12", HEADS, lengths).causal(true).paged(Pool::new(4));
    let case = build(&spec).unwrap();
    let options = base_options(&spec);
    let limited = |axis_max| {
        let limits = gpu.fresh_runner().device().limits();
        let limits = wgpu::Limits { max_compute_workgroups_per_dimension: axis_max, ..limits };
        gpu.limited_runner(limits)
    };
    // 7 * 7 * 7 groups are enough, 7 are not.
    let folded = limited(7).run(&case, &options).unwrap();
    assert_eq!(difference(&folded, &gpu.run(&case, &options).unwrap()), None);
    judge(&case, &folded).unwrap();
    let from = "return group.x + groups.x * (group.y + groups.y * group.z);";
    for (kernel, to) in [
        (KernelId::Prefill, "return group.x;"),
        (KernelId::Decode, "return group.x;"),
        (KernelId::Decode, "return group.x + groups.x * group.y;"),
    ] {
        let mutant = run_edited(&mut limited(7), &case, &options, &[edit(kernel, from, to)]);
        assert!(mutant.and_then(|output| judge(&case, &output).map_err(RunError::Failed)).is_err());
    }
    // Two on an axis do not do, and the refusal says so.
    let error = limited(2).run(&case, &options).unwrap_err();
    assert!(matches!(error, RunError::Bind(BindError::TooManyWorkgroups { axis_max: 2, needed: 9.., .. })), "{error}");
    // `n + LANES - 1 / LANES` and its like: the last workgroup is missing.
    for from in ["group >= params.prefill_groups", "group >= params.decode_groups"] {
        let kernel = if from.contains("prefill") { KernelId::Prefill } else { KernelId::Decode };
        let to: &'static str = if from.contains("prefill") {
            "group + 1u >= params.prefill_groups"
        } else {
            "group + 1u >= params.decode_groups"
        };
        noticed(gpu, "12 rounding", &spec, &[edit(kernel, from, to)]);
    }
}

/// Workgroup memory as naga sees it in a module.
fn declared_bytes(wgsl: &str) -> u32 {
    let module = naga::front::wgsl::parse_str(wgsl).unwrap();
    let mut layouter = naga::proc::Layouter::default();
    layouter.update(module.to_ctx()).unwrap();
    let workgroup = module.global_variables.iter().filter(|(_, v)| v.space == naga::AddressSpace::WorkGroup);
    workgroup.map(|(_, variable)| layouter[variable.ty].size.next_multiple_of(16)).sum()
}

#[test]
fn fault_13_more_workgroup_memory_than_there_is() {
    let Some(gpu) = gpu() else { return };
    let config = |heads: Heads, variants: Variants| {
        let (geometry, q, kv, out) = (heads.geometry().unwrap(), Dtype::F32, Dtype::F32, Dtype::F32);
        KernelConfig {
            geometry,
            q,
            kv: kv.into(),
            new_rows: kv.into(),
            out,
            modifiers: Modifiers::NONE,
            segments: NonZeroU32::MIN,
            variants,
        }
    };
    let counted = |kernel: KernelId, config: &KernelConfig, wgsl: &str| {
        let (found, stated) = (declared_bytes(wgsl), kernel.workgroup_bytes(config));
        if found == stated { Ok(()) } else { Err(format!("{found} bytes declared, {stated} stated")) }
    };
    for heads in
        [Heads::new(8, 1, 256), Heads::new(64, 1, 8), Heads::new(1, 1, 1), Heads::new(9, 3, 64), Heads::new(5, 1, 200)]
    {
        for variants in Variants::all(&heads.geometry().unwrap()) {
            let config = config(heads, variants);
            for kernel in KernelId::ALL {
                let wgsl = kernel.wgsl(&config).unwrap();
                counted(kernel, &config, &wgsl).unwrap();
                assert!(declared_bytes(&wgsl) <= wgpu::Limits::default().max_compute_workgroup_storage_size);
            }
            // Counted twice, or not at all: the check differs from the declaration.
            let wgsl = KernelId::Decode.wgsl(&config).unwrap();
            let scores = "var<workgroup> scores: array<f32, SCORES>";
            let mutant = wgsl.replace(scores, "var<workgroup> scores: array<f32, 2u * SCORES>");
            assert!(counted(KernelId::Decode, &config, &mutant).is_err());
        }
    }
    // wgpu does not check; the host refuses before a shader is made.
    let limits = wgpu::Limits { max_compute_workgroup_storage_size: 1024, ..gpu.fresh_runner().device().limits() };
    let error = pollster::block_on(Kernels::new(
        gpu.limited_runner(limits).device(),
        &config(HEADS, base(&HEADS.geometry().unwrap())),
    ))
    .unwrap_err();
    let needed = u64::from(Tiles::new(&HEADS.geometry().unwrap(), &base(&HEADS.geometry().unwrap())).decode_bytes());
    assert_eq!(
        error,
        BuildError::Limit { kernel: "decode", limit: "max_compute_workgroup_storage_size", found: 1024, needed }
    );
}

#[test]
fn fault_16_page_offsets_that_wrap() {
    let Some(gpu) = gpu() else { return };
    // A pool past 2^32 vectors of 16 bytes is refused, with the numbers.
    let geometry = HeadGeometry::new(8, 8, 128).unwrap();
    let page_size = PageSize::new(16).unwrap();
    let refused = KvLayout::new(geometry, Dtype::F16, page_size, u32::MAX);
    assert!(matches!(refused, Err(LayoutError::TooLarge { page_count: u32::MAX, page_bytes: 65_536, .. })));
    let largest = KvLayout::new(geometry, Dtype::F16, page_size, u32::MAX / 4096).unwrap();
    let last = largest.v_rows().offset(u32::MAX / 4096 - 1, 7, 15);
    assert_eq!(u64::from(last) * 16 + 256, largest.bytes());
    // A product that wraps at 16 bits, in a pool that needs more: the kernel reads another page.
    let spec = CaseSpec::new("faults/16", HEADS, [(40, 40), (1, 40)]).paged(Pool::new(16).times(300));
    let wraps = "rows.base + (page * rows.page_stride) % 65536u +";
    let edits = |kernel| [edit(kernel, "rows.base + page * rows.page_stride +", wraps)];
    for kernel in [KernelId::Prefill, KernelId::Decode] {
        noticed(gpu, "16", &spec, &edits(kernel));
    }
    let spec = spec.contiguous(Pool::new(16).times(300));
    noticed(gpu, "16 append", &spec, &edits(KernelId::Append));
}

#[test]
fn fault_17_page_tables_read_past_their_end() {
    let Some(gpu) = gpu() else { return };
    let [page_size, pages] = [PageSize::new(4).unwrap(), PageSize::new(3).unwrap()];
    let batch = Batch { q_indptr: &[0, 1], page_indptr: &[0, 3], page_ids: &[2, 0, 1], kv_len: &[12] };
    batch.validate(page_size, 3).unwrap();
    assert_eq!(
        Batch { kv_len: &[13], ..batch }.validate(page_size, 3),
        Err(BatchError::PastPages { seq: 0, found: 13, pages: pages.get(), page_size: 4, capacity: 12 })
    );
    // Rounding up where the host rounds down: every key but the first of a page is looked up in the next page.
    for (kernel, spec) in [(KernelId::Prefill, prefill("17")), (KernelId::Decode, decode("17"))] {
        let to = "(key + params.page_size - 1u) / params.page_size";
        let edits = [
            edit(kernel, "seq.page_begin + key / params.page_size", "seq.page_begin + ROUNDED"),
            edit(kernel, "ROUNDED", to),
        ];
        // The prefill kernel looks at the table's start only where it starts; let it start later.
        if kernel == KernelId::Decode {
            noticed(gpu, "17 decode", &spec, &edits);
        } else {
            let late = [edit(
                kernel,
                "next.page = checked_page(plan[next.entry]);",
                "next.page = checked_page(plan[next.entry + 1u]);",
            )];
            noticed(gpu, "17 prefill", &spec, &late);
        }
    }
}

#[test]
fn fault_18_rows_of_one_sequence_written_over_another() {
    let Some(gpu) = gpu() else { return };
    let spec = CaseSpec::new("faults/18", HEADS, [(20, 20), (1, 300), (30, 31), (2, 600)]).causal(true);
    for kernel in ATTENTION {
        let edits = [edit(kernel, "(seq.q_begin + row / GROUP) *", "(0u * seq.q_begin + row / GROUP) *")];
        noticed(gpu, "18 stride", &spec, &edits);
    }
    // An odd number of splits whose last is left out.
    let edits = [edit(KernelId::Merge, "split < source.splits; split++", "split < source.splits / 2u * 2u; split++")];
    noticed(gpu, "18 tail", &decode("18"), &edits);
}

/// What belongs to a row once (its normalisation, its sink) is not applied once per split.
#[test]
fn fault_20_once_per_split_instead_of_once() {
    let Some(gpu) = gpu() else { return };
    let edits = [edit(
        KernelId::Decode,
        "store_partial_chunk(index, chunk, acc);",
        "store_partial_chunk(index, chunk, scaled(acc, 1.0 / state.l));",
    )];
    noticed(gpu, "20", &decode("20"), &edits);

    let mut extras = CaseExtras::default();
    extras.sinks = Some(vec![2.0, -1.0, 0.5, 3.0]);
    for spec in [decode("20 sinks"), CaseSpec::new("20 sinks", HEADS, [(1, 700)])] {
        let case = build(&spec).unwrap().with_extras(extras.clone()).unwrap();
        let folded = "state = RowState(m, fma(state.l, kept, part.l * added));";
        let sink = "heads[query_row(source, kv_head, row) % (params.kv_heads * GROUP)].y";
        let per_split = format!("state = RowState(m, fma(state.l, kept, part.l * added) + exp2({sink} * LOG2_E - m));");
        let edits = |_: &KernelConfig| vec![edit_text(KernelId::Merge, folded.into(), per_split.clone())];
        noticed_case(gpu, "20 sinks", &spec, &case, edits, judged);
    }
}

/// One set of numbers drives the check, the memory, the pipeline and the grid.
#[test]
fn fault_21_host_and_kernel_disagree() {
    let Some(gpu) = gpu() else { return };
    let spec = CaseSpec::new("faults/21", HEADS, [(200, 200)]);
    noticed_by_variant(gpu, "21 prefill", &spec, |config| {
        let lanes = format!("const PREFILL_LANES = {}u;", config.tiles().prefill.lanes);
        let fewer = format!("const PREFILL_LANES = {}u;", config.tiles().prefill.lanes / 2);
        vec![edit_text(KernelId::Prefill, lanes, fewer)]
    });
    let keys = format!("const SPLIT_KEYS = {SPLIT_KEYS}u;");
    noticed(gpu, "21 decode", &decode("21"), &[edit_text(KernelId::Decode, keys, "const SPLIT_KEYS = 128u;".into())]);
    // Every geometry that is accepted fits the limits that the kernels promise to stay within.
    let limits = wgpu::Limits::default();
    for dim in 1..=512 {
        for group in (1..=71).chain([128, 1024]) {
            let geometry = HeadGeometry::with_v_head_dim(group, 1, 64 + dim, 513 - dim).unwrap();
            for variants in Variants::all(&geometry) {
                let tiles = Tiles::new(&geometry, &variants);
                assert!(tiles.decode_bytes() <= limits.max_compute_workgroup_storage_size, "{geometry:?}");
                assert!(tiles.decode_rows > 0 && tiles.row_slots <= tiles.decode_lanes);
                assert!(tiles.merge_rows > 0 && tiles.merge_rows * tiles.v_chunks <= LANES);
                assert!(tiles.key_streams > 0 && tiles.scores >= tiles.decode_rows * SPLIT_KEYS);
                assert!(tiles.v_span * tiles.decode_lanes >= tiles.v_chunks);
            }
        }
    }
}

#[test]
fn fault_22_a_launch_that_is_dropped() {
    let Some(gpu) = gpu() else { return };
    for (kernel, spec) in [
        (KernelId::Prefill, prefill("22")),
        (KernelId::Decode, decode("22")),
        (KernelId::Merge, decode("22")),
        (KernelId::Append, prefill("22").contiguous(Pool::new(16))),
    ] {
        let edits = |_: &KernelConfig| vec![edit(kernel, "atomicAdd(&workspace.status[STATUS_DONE], 1u);", "")];
        refused_in(gpu, &spec, edits, |error| {
            matches!(error, RunError::Status(StatusError::Incomplete { needed: 1.., .. }))
        });
    }
    // A pool that the device cannot bind is an error with the numbers, not a log line: whether no binding is left for it, or
    // not even a page fits.
    let run = |page_size: u32, binding: u64, bindings: u32| {
        let limits = gpu.fresh_runner().device().limits();
        let limits = wgpu::Limits { max_storage_buffers_per_shader_stage: bindings, ..limits };
        let spec = prefill("22").paged(Pool::new(page_size).times(20));
        let limits = wgpu::Limits { max_storage_buffer_binding_size: binding, ..limits };
        gpu.limited_runner(limits).run(&build(&spec).unwrap(), &base_options(&spec)).unwrap_err()
    };
    let error = run(4, 8192, 5);
    assert!(matches!(error, RunError::Build(BuildError::Limit { found: 5, needed: 6, .. })), "{error}");
    let error = run(100, 8192, 8);
    assert!(matches!(error, RunError::Layout(LayoutError::Binding { found: 8192, needed: 8193.. })), "{error}");
}

/// A page id outside the pool, past the host's checks: the kernel does not follow it, and says so.
#[test]
fn a_page_id_that_slipped_past_the_host_is_not_followed() {
    let Some(gpu) = gpu() else { return };
    for (kernel, spec) in [(KernelId::Prefill, prefill("page")), (KernelId::Decode, decode("page"))] {
        let edits = |_: &KernelConfig| {
            vec![edit(
                kernel,
                "return Page(id, id < params.page_count);",
                "return Page(id + 9999u, id + 9999u < params.page_count);",
            )]
        };
        refused_in(gpu, &spec, edits, |error| matches!(error, RunError::Status(StatusError::PageId { bits: 1 })));
    }
}

/// Older llvmpipe ends an invocation's loops after 65,535 iterations in all, without a word: keys would be left out.
#[test]
fn a_loop_that_the_driver_ends_early_is_reported() {
    let Some(gpu) = gpu() else { return };
    for (kernel, spec, from, to) in [
        (KernelId::Prefill, prefill("cut"), "step += STEP_KEYS) {", "step += STEP_KEYS) { if step > 32u { break; }"),
        (
            KernelId::Merge,
            decode("cut"),
            "split < source.splits; split++) {",
            "split < source.splits; split++) { if split > 0u { break; }",
        ),
    ] {
        refused_in(
            gpu,
            &spec,
            |_| vec![edit(kernel, from, to)],
            |error| matches!(error, RunError::Status(StatusError::CutShort { .. })),
        );
    }
}

#[test]
fn fault_37_a_loop_local_variable_that_keeps_its_value() {
    let Some(gpu) = gpu() else { return };
    let edits = [
        edit(KernelId::Prefill, "        var s_0_0 = 0.0;\n", ""),
        edit(KernelId::Prefill, "    var at = cursor_at(", "    var s_0_0 = 0.0;\n    var at = cursor_at("),
    ];
    noticed(gpu, "37 prefill", &prefill("37"), &edits);
    noticed_by_variant(gpu, "37 decode", &decode("37"), |config| {
        let (from, to) = match config.variants.decode {
            DecodeVariant::Workgroup => (
                "    for (var key = aligned(first, DECODE_LANES) + lane; key < keys; key += DECODE_LANES) {\n        let k_row",
                "    var s_0 = 0.0;\n    for (var key = aligned(first, DECODE_LANES) + lane; key < keys; key += DECODE_LANES) {\n        let k_row",
            ),
            DecodeVariant::Streams { .. } => {
                ("    for (var i = 0u; i < SPLIT_KEYS", "    var s_0 = 0.0;\n    for (var i = 0u; i < SPLIT_KEYS")
            }
            DecodeVariant::Exchange { .. } => ("    const TURN", "    var s_0 = 0.0;\n    const TURN"),
        };
        vec![edit(KernelId::Decode, "        var s_0 = 0.0;\n", ""), edit(KernelId::Decode, from, to)]
    });
}

/// Every dimension has a kernel that fits, and none takes minutes to compile (the limit leaves room for a loaded machine).
#[test]
fn fault_38_tiles_that_do_not_fit() {
    let Some(gpu) = gpu() else { return };
    let runner = gpu.fresh_runner();
    for heads in
        [Heads::new(16, 1, 576).with_v(512), Heads::new(16, 1, 1).with_v(512), Heads::new(3, 3, 111).with_v(17)]
    {
        let config = KernelConfig {
            geometry: heads.geometry().unwrap(),
            q: Dtype::Bf16,
            kv: Dtype::F16.into(),
            new_rows: Dtype::F16.into(),
            out: Dtype::F16,
            modifiers: Modifiers::NONE,
            segments: std::num::NonZeroU32::MIN,
            variants: base(&heads.geometry().unwrap()),
        };
        let start = std::time::Instant::now();
        pollster::block_on(Kernels::new(runner.device(), &config)).unwrap();
        assert!(start.elapsed().as_secs() < 300, "{heads:?} took {:?}", start.elapsed());
        // A tile of as many rows as registers allow, whatever the memory: what the sizes prevent.
        let rows = format!("const DECODE_ROWS = {}u;", config.tiles().decode_rows);
        let scores = format!("const SCORES = {}u;", config.tiles().scores);
        let wgsl = KernelId::Decode.wgsl(&config).unwrap();
        let mutant = wgsl.replace(&rows, "const DECODE_ROWS = 16u;").replace(&scores, "const SCORES = 4096u;");
        let limit = wgpu::Limits::default().max_compute_workgroup_storage_size;
        assert!(declared_bytes(&wgsl) <= limit && declared_bytes(&mutant) > limit);
    }
}
