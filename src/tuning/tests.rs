use std::num::NonZeroU32;

use proptest::prelude::*;

use super::*;
use crate::geometry::{Dtype, HeadGeometry};
use crate::kernels::{KernelConfig, Modifiers, names};

fn info(name: &str, driver: &str, version: &str) -> wgpu::AdapterInfo {
    wgpu::AdapterInfo {
        name: name.into(),
        driver: driver.into(),
        driver_info: version.into(),
        ..wgpu::AdapterInfo::new(wgpu::DeviceType::DiscreteGpu, wgpu::Backend::Vulkan)
    }
}

fn timing<V>(variant: V, run_ms: f64, compile_ms: f64) -> Timing<V> {
    Timing { variant, run_ms, compile_ms }
}

fn shape(group: u32, dim: u32, dtype: Dtype) -> KernelShape {
    let geometry = HeadGeometry::new(group, 1, dim).unwrap();
    let variants = "prefill-uniform-r1k4l64+decode-workgroup".parse().unwrap();
    let (kv, new_rows) = (dtype.into(), dtype.into());
    KernelConfig {
        geometry,
        q: dtype,
        kv,
        new_rows,
        out: Dtype::F32,
        modifiers: Modifiers::NONE,
        segments: NonZeroU32::MIN,
        variants,
    }
    .shape()
}

fn timings<V: PartialEq + fmt::Debug>(variant: impl Strategy<Value = V>) -> impl Strategy<Value = Vec<Timing<V>>> {
    let timing =
        (variant, 0.0..1e5_f64, 0.0..1e6_f64).prop_map(|(variant, run, compile)| timing(variant, run, compile));
    proptest::collection::vec(timing, 1..5).prop_map(|all| {
        let mut distinct: Vec<Timing<V>> = Vec::new();
        for timing in all {
            if !distinct.iter().any(|known| known.variant == timing.variant) {
                distinct.push(timing);
            }
        }
        distinct
    })
}

fn entry() -> impl Strategy<Value = TuningEntry> {
    let dtype = proptest::sample::select(vec![Dtype::F32, Dtype::F16, Dtype::Bf16]);
    let shape = (1..20_u32, 1..257_u32, dtype).prop_map(|(group, dim, dtype)| shape(group, dim, dtype));
    (shape, timings(names::tests::prefill()), timings(names::tests::decode()))
        .prop_map(|(shape, prefill, decode)| TuningEntry::measured(shape, prefill, decode).unwrap())
}

proptest! {
    /// Whatever an adapter calls itself, and whatever was measured.
    #[test]
    fn a_table_is_read_back_from_its_text(
        (name, driver, version) in (any::<String>(), any::<String>(), any::<String>()),
        entries in proptest::collection::vec(entry(), 0..5),
    ) {
        let info = info(&name, &driver, &version);
        let mut tuning = Tuning::new(&info);
        entries.into_iter().for_each(|entry| tuning.insert(entry));
        let text = tuning.to_string();
        let read: Tuning = text.parse().unwrap();
        prop_assert_eq!(&read, &tuning);
        prop_assert_eq!(read.check(&info), Ok(()));
        prop_assert_eq!(read.to_string(), text);
    }

    /// No text makes the parser do anything but return, and what it takes it writes in a form that it takes.
    #[test]
    fn damaged_text(cuts in proptest::collection::vec((0..TABLE.len(), 0..TABLE.len(), ".{0,3}"), 1..4)) {
        let mut text = TABLE.to_owned();
        for (at, len, insert) in cuts {
            let at = at.min(text.len());
            let end = (at + len % 8).min(text.len());
            if text.is_char_boundary(at) && text.is_char_boundary(end) {
                text.replace_range(at..end, &insert);
            }
        }
        match text.parse::<Tuning>() {
            Ok(tuning) => prop_assert_eq!(tuning.to_string().parse(), Ok(tuning)),
            Err(error) => {
                let TuningError::Line { line, needed, .. } = error else { panic!("{error}") };
                prop_assert!((1..=text.lines().count() + 1).contains(&line) && !needed.is_empty());
            }
        }
    }
}

const TABLE: &str = "\
paged-attention tuning 1
version 0.1.0
adapter AMD Radeon 780M
backend vulkan
driver radv Mesa 25.0.7

# The first prefill and the first decode of a shape are used.
group=3 head_dim=64 v_head_dim=64 q=f16 kv=f16 out=f32
  prefill-broadcast32-r1k4l64 run_ms=1.25 compile_ms=41.5
  prefill-broadcast32-r2k4l64 run_ms=1.2 compile_ms=60.25
  decode-exchange32 run_ms=0.5 compile_ms=30.125
group=1 head_dim=128 v_head_dim=128 q=f32 kv=f32 out=f32
  prefill-uniform-r1k4l64 run_ms=9 compile_ms=0
  decode-workgroup run_ms=3 compile_ms=0
";

#[test]
fn a_table_by_hand() {
    let tuning: Tuning = TABLE.parse().unwrap();
    assert_eq!(tuning.to_string(), TABLE);
    let key = tuning.key();
    assert_eq!((key.version(), key.adapter()), ("0.1.0", "AMD Radeon 780M"));
    assert_eq!((key.backend(), key.driver()), ("vulkan", "radv Mesa 25.0.7"));
    let [first, second] = tuning.entries() else { panic!("two entries: {tuning:?}") };
    // The order is the reader's to change: the first line is used, though the second is faster.
    assert_eq!(first.variants().to_string(), "prefill-broadcast32-r1k4l64+decode-exchange32");
    assert_eq!((first.prefill().len(), first.decode().len()), (2, 1));
    assert_eq!(first.prefill()[1].run_ms, 1.2);
    assert_eq!(second.shape(), &shape(1, 128, Dtype::F32));
    // Line ends, blank lines, comments and indentation do not matter.
    let loose = TABLE.replace('\n', "\r\n\r\n# a note\r\n").replace("  ", "\t ");
    assert_eq!(loose.parse(), Ok(tuning));
}

#[test]
fn corrupt_text_is_refused_by_line() {
    for (from, to, line, found, needed) in [
        ("paged-attention tuning 1", "", 2, "version 0.1.0", "`paged-attention tuning 1`"),
        ("tuning 1", "tuning 2", 1, "paged-attention tuning 2", "`paged-attention tuning 1`"),
        (TABLE, "", 1, "", "`paged-attention tuning 1`"),
        ("version 0.1.0\n", "", 2, "adapter AMD Radeon 780M", "`version`"),
        ("version 0.1.0", "versions 0.1.0", 2, "versions 0.1.0", "`version`"),
        ("adapter AMD Radeon 780M\n", "", 3, "backend vulkan", "`adapter`"),
        ("backend", "Backend", 4, "Backend vulkan", "`backend`"),
        ("driver radv", "radv", 5, "radv Mesa 25.0.7", "`driver`"),
        ("group=3 head", "group=0 head", 8, "group=0 head_dim=64 v_head_dim=64 q=f16 kv=f16 out=f32", "a shape"),
        ("out=f32\n  prefill-b", "out=bf16\n  prefill-b", 8, "bf16", "an output type"),
        ("broadcast32-r1", "broadcast33-r1", 9, "prefill-broadcast33-r1k4l64", "a subgroup size"),
        ("r2k4l64", "r2k4l48", 10, "prefill-broadcast32-r2k4l48", "a number of lanes"),
        ("r2k4l64", "r1k4l64", 10, "prefill-broadcast32-r1k4l64", "a variant that the shape does not have"),
        ("run_ms=1.25", "run_ms=-1.25", 9, "run_ms=-1.25", "run_ms=.."),
        ("run_ms=1.25", "run_ms=inf", 9, "run_ms=inf", "run_ms=.."),
        ("run_ms=1.25", "run_ms=nan", 9, "run_ms=nan", "run_ms=.."),
        ("run_ms=1.25 ", "", 9, "compile_ms=41.5", "run_ms=.."),
        (" compile_ms=41.5", "", 9, "run_ms=1.25", "compile_ms=.."),
        ("compile_ms=41.5", "compile_ms=41.5 x", 9, " x", "compile_ms=.."),
        ("  decode-exchange32 run_ms=0.5 compile_ms=30.125\n", "", 11, "group=1", "a decode variant"),
        ("decode-exchange32", "decode-exchanged", 11, "decode-exchanged", "a decode variant"),
        ("  decode-workgroup run_ms=3 compile_ms=0\n", "", 14, "", "a decode variant"),
        ("group=1 head_dim=128 v_head_dim=128 q=f32 kv=f32 out=f32\n", "", 12, "prefill-uniform", "a shape"),
        (
            "group=1 head_dim=128 v_head_dim=128 q=f32 kv=f32",
            "group=3 head_dim=64 v_head_dim=64 q=f16 kv=f16",
            12,
            "group=3",
            "a shape that the table does not have",
        ),
    ] {
        assert!(TABLE.contains(from), "{from:?} is not in the table");
        let error = TABLE.replacen(from, to, 1).parse::<Tuning>().unwrap_err();
        let TuningError::Line { line: at, found: text, needed: what } = &error else { panic!("{error}") };
        assert_eq!(*at, line, "{from:?} as {to:?}: {error}");
        assert!(text.contains(found) && text.is_empty() == found.is_empty(), "{from:?} as {to:?}: {error}");
        assert!(what.contains(needed), "{from:?} as {to:?}: {error}");
        let says = if found.is_empty() { "found the end" } else { found };
        assert!(error.to_string().starts_with(&format!("line {line} ")), "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[test]
fn tables_of_another_key_are_refused() {
    let own = info("AMD Radeon 780M", "radv", "Mesa 25.0.7");
    let text = Tuning::new(&own).to_string();
    assert_eq!(text.parse::<Tuning>().unwrap().check(&own), Ok(()));
    let refused = |text: &str, info: &wgpu::AdapterInfo| {
        let tuning: Tuning = text.parse().unwrap();
        let error = tuning.check(info).unwrap_err();
        let TuningError::OtherKey { found, needed } = &error else { panic!("{error}") };
        assert_eq!((&**found, &**needed), (tuning.key(), &TuningKey::new(info)));
        assert_eq!(tuning.variants(info, &shape(1, 64, Dtype::F32)), Err(error.clone()));
        error.to_string()
    };
    for (other, says) in [
        (info("AMD Radeon 890M", "radv", "Mesa 25.0.7"), "AMD Radeon 890M"),
        (info("AMD Radeon 780M", "amdvlk", "Mesa 25.0.7"), "amdvlk"),
        (info("AMD Radeon 780M", "radv", "Mesa 25.0.8"), "25.0.8"),
        (wgpu::AdapterInfo { backend: wgpu::Backend::Dx12, ..own.clone() }, "dx12"),
    ] {
        let error = refused(&text, &other);
        assert!(error.contains(says) && error.contains("AMD Radeon 780M (vulkan, radv Mesa 25.0.7)"), "{error}");
    }
    let version = env!("CARGO_PKG_VERSION");
    let error = refused(&text.replace(&format!("version {version}"), "version 0.0.9"), &own);
    assert!(error.contains("paged-attention 0.0.9") && error.contains(version), "{error}");
}

#[test]
fn one_entry_per_shape() {
    let mut tuning: Tuning = TABLE.parse().unwrap();
    let again = TuningEntry::measured(
        shape(1, 128, Dtype::F32),
        vec![timing("prefill-uniform-r2k4l64".parse().unwrap(), 8.0, 1.0)],
        vec![timing(DecodeVariant::Workgroup, 3.0, 1.0)],
    );
    tuning.insert(again.clone().unwrap());
    assert_eq!(tuning.entries().len(), 2);
    assert_eq!(tuning.entry(&shape(1, 128, Dtype::F32)), again.as_ref());
    assert_eq!(tuning.entry(&shape(2, 128, Dtype::F32)), None);
    assert_eq!(TuningEntry::measured(shape(1, 8, Dtype::F32), vec![], vec![]), None);
}

#[test]
fn the_fastest_wins_and_compile_time_decides_among_near_ones() {
    let order = |timings: &[(u32, f64, f64)]| {
        let timings = timings.iter().map(|(name, run, compile)| timing(*name, *run, *compile)).collect();
        sorted(timings).iter().map(|timing| timing.variant).collect::<Vec<_>>()
    };
    assert_eq!(order(&[(0, 3.0, 1.0), (1, 1.0, 9.0), (2, 2.0, 1.0)]), [1, 2, 0]);
    // 5 per cent slower, quicker to compile; 6 per cent are too much.
    assert_eq!(order(&[(0, 1.0, 9.0), (1, 1.05, 2.0), (2, 1.06, 1.0)]), [1, 0, 2]);
    // Equally quick: the faster one.
    assert_eq!(order(&[(0, 1.02, 3.0), (1, 1.01, 3.0), (2, 1.0, 4.0)]), [1, 2, 0]);
    assert_eq!(order(&[]), [0_u32; 0]);
}
