//! What a case must not be.

use super::*;

/// Parts of a case that is right, to be spoilt.
struct Parts {
    heads: HeadGeometry,
    options: AttentionOptions,
    q: Tensor,
    q_indptr: Vec<u32>,
    kv: KvSource,
}

impl Parts {
    fn contiguous() -> Self {
        let heads = HeadGeometry::with_v_head_dim(2, 1, 4, 3).unwrap();
        Self {
            heads,
            options: AttentionOptions::new(&heads),
            q: tensor(&[3, 2, 4], &[1.0; 24]),
            q_indptr: vec![0, 1, 3],
            kv: KvSource::Contiguous {
                k: tensor(&[5, 1, 4], &[1.0; 20]),
                v: tensor(&[5, 1, 3], &[1.0; 15]),
                kv_indptr: vec![0, 2, 5],
            },
        }
    }

    fn paged() -> Self {
        Self {
            kv: KvSource::Paged {
                k_pages: tensor(&[3, 2, 1, 4], &[1.0; 24]),
                v_pages: tensor(&[3, 2, 1, 3], &[1.0; 18]),
                page_indptr: vec![0, 1, 3],
                page_ids: vec![2, 2, 0],
                kv_len: vec![2, 3],
            },
            ..Self::contiguous()
        }
    }

    fn build(self) -> Result<Case, CaseError> {
        Case::new(self.heads, self.options, self.q, self.q_indptr, self.kv)
    }
}

fn spoil_contiguous(spoil: impl Fn(&mut Tensor, &mut Tensor, &mut Vec<u32>)) -> CaseError {
    let mut parts = Parts::contiguous();
    if let KvSource::Contiguous { k, v, kv_indptr } = &mut parts.kv {
        spoil(k, v, kv_indptr);
    }
    parts.build().unwrap_err()
}

fn spoil_paged(spoil: impl Fn(&mut Tensor, &mut Tensor, &mut Vec<u32>, &mut Vec<u32>, &mut Vec<u32>)) -> CaseError {
    let mut parts = Parts::paged();
    if let KvSource::Paged { k_pages, v_pages, page_indptr, page_ids, kv_len } = &mut parts.kv {
        spoil(k_pages, v_pages, page_indptr, page_ids, kv_len);
    }
    parts.build().unwrap_err()
}

fn shape_of(error: &CaseError) -> (&'static str, &[usize], &str) {
    match error {
        CaseError::Shape { tensor, found, needed } => (tensor, found, needed),
        other => panic!("{other}"),
    }
}

#[test]
fn shapes_are_checked() {
    assert!(Parts::contiguous().build().is_ok() && Parts::paged().build().is_ok());
    for shape in [&[3, 2, 5][..], &[3, 1, 4], &[3, 8], &[24], &[]] {
        let mut parts = Parts::contiguous();
        parts.q = tensor(shape, &vec![1.0; shape.iter().product()]);
        let error = parts.build().unwrap_err();
        assert_eq!(shape_of(&error), ("q", shape, "[total_q, 2, 4]"));
    }
    let error = spoil_contiguous(|k, _, _| *k = tensor(&[5, 2, 4], &[1.0; 40]));
    assert_eq!(shape_of(&error), ("k", &[5, 2, 4][..], "[total_kv, 1, 4]"));
    let error = spoil_contiguous(|_, v, _| *v = tensor(&[5, 1, 4], &[1.0; 20]));
    assert_eq!(shape_of(&error), ("v", &[5, 1, 4][..], "[5, 1, 3]"));
    let error = spoil_contiguous(|_, v, _| *v = tensor(&[4, 1, 3], &[1.0; 12]));
    assert_eq!(shape_of(&error), ("v", &[4, 1, 3][..], "[5, 1, 3]"));
    let error = spoil_paged(|k, _, _, _, _| *k = tensor(&[3, 2, 4], &[1.0; 24]));
    assert_eq!(shape_of(&error), ("k_pages", &[3, 2, 4][..], "[pages, page_size, 1, 4]"));
    let error = spoil_paged(|_, v, _, _, _| *v = tensor(&[2, 3, 1, 3], &[1.0; 18]));
    assert_eq!(shape_of(&error), ("v_pages", &[2, 3, 1, 3][..], "[3, 2, 1, 3]"));
    // A page of no tokens, with no pages and with some.
    for pages in [0, 3] {
        let error = spoil_paged(|k, v, _, _, _| {
            (*k, *v) = (tensor(&[pages, 0, 1, 4], &[]), tensor(&[pages, 0, 1, 3], &[]));
        });
        assert_eq!(error, CaseError::Geometry(GeometryError::ZeroPageSize));
    }
    let error = spoil_paged(|k, v, _, _, _| {
        let many = 1 << 33;
        (*k, *v) = (tensor(&[many, 0, 1, 4], &[]), tensor(&[many, 0, 1, 3], &[]));
    });
    assert_eq!(shape_of(&error).0, "k_pages");
    let half = |shape: &[usize], count| Tensor::from_f32(Dtype::F16, shape, &vec![1.0; count]).unwrap();
    let mixed = |tensor| CaseError::KvDtype { tensor, found: Dtype::F16, needed: Dtype::F32 };
    assert_eq!(spoil_contiguous(|_, v, _| *v = half(&[5, 1, 3], 15)), mixed("v"));
    assert_eq!(spoil_paged(|_, v, _, _, _| *v = half(&[3, 2, 1, 3], 18)), mixed("v_pages"));
}

#[test]
fn indices_are_checked() {
    let q_error = |q_indptr: Vec<u32>| Parts { q_indptr, ..Parts::contiguous() }.build().unwrap_err();
    let batch = CaseError::Batch;
    let why = "one more than there are sequences";
    assert_eq!(q_error(vec![]), batch(BatchError::Length { tensor: "q_indptr", found: 0, needed: 1, why }));
    assert_eq!(q_error(vec![1, 1, 3]), batch(BatchError::Start { tensor: "q_indptr", found: 1 }));
    assert_eq!(
        q_error(vec![0, 4, 3]),
        batch(BatchError::Order { tensor: "q_indptr", index: 2, found: 3, previous: 4 })
    );
    assert_eq!(q_error(vec![0, 1, 2]), batch(BatchError::End { tensor: "q_indptr", found: 2, needed: 3 }));
    let why = "as many as `q_indptr` has";
    assert_eq!(q_error(vec![0, 3]), batch(BatchError::Length { tensor: "kv_indptr", found: 3, needed: 2, why }));

    let error = spoil_contiguous(|_, _, kv_indptr| *kv_indptr = vec![0, 2, 6]);
    assert_eq!(error, batch(BatchError::End { tensor: "kv_indptr", found: 6, needed: 5 }));
    let error = spoil_contiguous(|_, _, kv_indptr| *kv_indptr = vec![0, 6, 5]);
    assert_eq!(error, batch(BatchError::Order { tensor: "kv_indptr", index: 2, found: 5, previous: 6 }));

    let error = spoil_paged(|_, _, _, _, kv_len| kv_len.push(0));
    assert!(matches!(error, CaseError::Batch(BatchError::Length { tensor: "q_indptr", found: 3, needed: 4, .. })));
    let error = spoil_paged(|_, _, page_indptr, _, _| page_indptr.push(3));
    assert!(matches!(error, CaseError::Batch(BatchError::Length { tensor: "page_indptr", found: 4, needed: 3, .. })));
    let error = spoil_paged(|_, _, page_indptr, _, _| *page_indptr = vec![0, 1, 2]);
    assert_eq!(error, batch(BatchError::End { tensor: "page_indptr", found: 2, needed: 3 }));
    let error = spoil_paged(|_, _, _, page_ids, _| page_ids[1] = 3);
    assert_eq!(error, batch(BatchError::PageId { index: 1, found: 3, page_count: 3 }));
    let error = spoil_paged(|_, _, _, _, kv_len| kv_len[1] = 5);
    assert_eq!(error, batch(BatchError::PastPages { seq: 1, found: 5, pages: 2, page_size: 2, capacity: 4 }));
    let error = spoil_paged(|_, _, _, _, kv_len| kv_len[1] = u32::MAX);
    assert!(matches!(error, CaseError::Batch(BatchError::PastPages { seq: 1, found: u32::MAX, .. })));
}

/// `tensor` with one element replaced.
fn with(tensor: &Tensor, at: usize, value: f32) -> Tensor {
    let mut values = tensor.to_f32();
    values[at] = value;
    Tensor::from_f32(tensor.dtype(), tensor.shape(), &values).unwrap()
}

#[test]
fn owned_values_must_be_finite() {
    let not_finite = |error: CaseError| match error {
        CaseError::NotFinite { tensor, index, value } if !value.is_finite() => (tensor, index),
        other => panic!("{other}"),
    };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut parts = Parts::contiguous();
        parts.q = with(&parts.q, 8 + 4 + 2, bad);
        assert_eq!(not_finite(parts.build().unwrap_err()), ("q", vec![1, 1, 2]));
        assert_eq!(not_finite(spoil_contiguous(|k, _, _| *k = with(k, 19, bad))), ("k", vec![4, 0, 3]));
        assert_eq!(not_finite(spoil_contiguous(|_, v, _| *v = with(v, 1, bad))), ("v", vec![0, 0, 1]));
        assert_eq!(not_finite(spoil_paged(|k, _, _, _, _| *k = with(k, 3, bad))), ("k_pages", vec![0, 0, 0, 3]));
        assert_eq!(not_finite(spoil_paged(|_, v, _, _, _| *v = with(v, 17, bad))), ("v_pages", vec![2, 1, 0, 2]));
        // Page 1 is spare, and slot 1 of page 0 is past the second sequence's end.
        for at in [4, 8, 12] {
            let mut parts = Parts::paged();
            if let KvSource::Paged { k_pages, v_pages, .. } = &mut parts.kv {
                *k_pages = with(k_pages, at, bad);
                *v_pages = with(v_pages, at * 3 / 4, bad);
            }
            assert!(parts.build().is_ok());
        }
    }
    for (half, bad) in [(Dtype::F16, f32::NAN), (Dtype::Bf16, f32::INFINITY)] {
        let mut parts = Parts::contiguous();
        parts.q = with(&Tensor::from_f32(half, &[3, 2, 4], &[1.0; 24]).unwrap(), 0, bad);
        assert_eq!(not_finite(parts.build().unwrap_err()), ("q", vec![0, 0, 0]));
    }
    for scale in [f64::NAN, f64::INFINITY] {
        let mut parts = Parts::contiguous();
        parts.options = parts.options.with_scale(scale);
        assert!(matches!(parts.build(), Err(CaseError::Geometry(GeometryError::Scale { .. }))));
    }
}

#[test]
fn scores_must_stay_in_range() {
    let heads = HeadGeometry::new(2, 2, 2).unwrap();
    let build = |scale: f64, q: [f32; 4], k: [f32; 8]| {
        let options = AttentionOptions::new(&heads).with_scale(scale).with_causal(true);
        single(heads, options, &[[0.0; 4], q].concat(), &k, &[0.0; 8])
    };
    let ones = [1.0; 8];
    // Head 1 against key 1 of KV head 1: opposite signs do not help, partial sums count.
    let mut k = ones;
    (k[6], k[7]) = (1e19, -1e19);
    assert!(build(1.0, [0.0, 0.0, 2.5e18, 2.5e18], k).is_ok());
    match build(1.0, [0.0, 0.0, 3e18, 3e18], k) {
        Err(CaseError::ScoreRange { row: 1, head: 1, key: 1, found, limit }) => {
            assert!((found / 6e37 - 1.0).abs() < 1e-6);
            assert!((limit * std::f64::consts::LOG2_E / SCORE_LOG2_MAX - 1.0).abs() < 1e-3);
        }
        other => panic!("{other:?}"),
    }
    // The scale counts, and its sign does not.
    assert!(matches!(build(-100.0, [0.0, 0.0, 1e18, 0.0], k), Err(CaseError::ScoreRange { row: 1, .. })));
    // A dot product that overflows before a small scale helps.
    match build(1e-30, [0.0, 0.0, 1e20, 0.0], k) {
        Err(CaseError::DotRange { row: 1, head: 1, key: 1, found, .. }) => assert!((found / 1e39 - 1.0).abs() < 1e-6),
        other => panic!("{other:?}"),
    }
    // A query that overflows when it is scaled first, whatever the keys.
    match build(1e20, [1e30, 0.0, 0.0, 0.0], [0.0; 8]) {
        Err(CaseError::ScaledQueryRange { row: 1, head: 0, found, .. }) => assert!((found / 1e50 - 1.0).abs() < 1e-6),
        other => panic!("{other:?}"),
    }
    assert!(build(1e38, [0.0; 4], [0.0; 8]).is_ok());
    assert!(matches!(build(-3e38, [0.0; 4], [0.0; 8]), Err(CaseError::ScaleRange { .. })));
    // Where Cauchy and Schwarz do not suffice, the exact sum decides: these two are orthogonal.
    let mut k = ones;
    (k[6], k[7]) = (0.0, 1e19);
    assert!(build(1.0, [0.0, 0.0, 1e19, 0.0], k).is_ok());
    // Keys that the mask hides are in range as well: row 0 sees only key 0.
    let options = AttentionOptions::new(&heads).with_scale(1.0).with_causal(true);
    let q = [0.0, 0.0, 1e19, 1e19, 0.0, 0.0, 0.0, 0.0];
    assert!(matches!(
        single(heads, options, &q, &k, &[0.0; 8]),
        Err(CaseError::ScoreRange { row: 0, head: 1, key: 1, .. })
    ));
}

fn with_extras(change: impl FnOnce(&mut CaseExtras)) -> Result<Case, CaseError> {
    let mut extras = CaseExtras::default();
    change(&mut extras);
    Parts::contiguous().build()?.with_extras(extras)
}

/// 2 heads; 1 row on 2 keys and 2 on 3 take 8 entries.
#[test]
fn shapes_of_extras_are_checked() {
    let good = with_extras(|e| {
        e.alibi_slopes = Some(vec![0.5; 2]);
        e.sinks = Some(vec![0.5; 2]);
        e.mask = Some(vec![true; 8]);
        e.bias = Some(tensor(&[2, 8], &[0.5; 16]));
    });
    assert_eq!(good.unwrap().score_indptr(), [0, 2, 8]);
    for (tensor, found, error) in [
        ("alibi_slopes", &[3][..], with_extras(|e| e.alibi_slopes = Some(vec![0.5; 3]))),
        ("sinks", &[1], with_extras(|e| e.sinks = Some(vec![0.5; 1]))),
        ("mask", &[9], with_extras(|e| e.mask = Some(vec![true; 9]))),
        ("mask", &[0], with_extras(|e| e.mask = Some(vec![]))),
        ("bias", &[1, 7], with_extras(|e| e.bias = Some(super::tensor(&[1, 7], &[0.5; 7])))),
        ("bias", &[3, 8], with_extras(|e| e.bias = Some(super::tensor(&[3, 8], &[0.5; 24])))),
        ("bias", &[0, 8], with_extras(|e| e.bias = Some(super::tensor(&[0, 8], &[])))),
        ("bias", &[8], with_extras(|e| e.bias = Some(super::tensor(&[8], &[0.5; 8])))),
        ("bias", &[1, 8, 1], with_extras(|e| e.bias = Some(super::tensor(&[1, 8, 1], &[0.5; 8])))),
    ] {
        let error = error.unwrap_err();
        let (name, shape, needed) = shape_of(&error);
        assert_eq!((name, shape), (tensor, found));
        assert!(needed.contains(if ["mask", "bias"].contains(&name) { "8]" } else { "[2]" }), "{error}");
    }
    let bias = Tensor::from_f32(Dtype::Bf16, &[1, 8], &[0.5; 8]).unwrap();
    assert_eq!(with_extras(|e| e.bias = Some(bias)).unwrap_err(), CaseError::BiasDtype { found: Dtype::Bf16 });
}

#[test]
fn values_of_extras_are_checked() {
    let not_finite = |case: Result<Case, CaseError>| match case {
        Err(CaseError::NotFinite { tensor, index, value }) if !value.is_finite() => (tensor, index),
        other => panic!("{other:?}"),
    };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let slopes = with_extras(|e| e.alibi_slopes = Some(vec![0.5, bad]));
        assert_eq!(not_finite(slopes), ("alibi_slopes", vec![1]));
        assert_eq!(not_finite(with_extras(|e| e.sinks = Some(vec![bad, 0.5]))), ("sinks", vec![0]));
        for (dtype, heads, at, index) in [(Dtype::F32, 1, 3, vec![0, 3]), (Dtype::F16, 2, 13, vec![1, 5])] {
            let mut values = vec![0.5; heads * 8];
            values[at] = bad;
            let case = with_extras(|e| e.bias = Some(Tensor::from_f32(dtype, &[heads, 8], &values).unwrap()));
            match bad == f32::NEG_INFINITY {
                true => assert!(case.is_ok()),
                false => assert_eq!(not_finite(case), ("bias", index)),
            }
        }
    }
    let heads = HeadGeometry::new(1, 1, 1).unwrap();
    let options = AttentionOptions::new(&heads);
    let build = |options, change: &dyn Fn(&mut CaseExtras)| {
        let mut extras = CaseExtras::default();
        change(&mut extras);
        single(heads, options, &[1.0, 1.0], &[1.0, 2.0, 3.0], &[1.0; 3])?.with_extras(extras)
    };
    for bad in [f64::NAN, f64::INFINITY, 0.0, -1.0, 1e-19, 1e19] {
        let error = build(options.with_softcap(Some(bad)), &|_| {}).unwrap_err();
        assert!(matches!(error, CaseError::SoftcapRange { .. }), "{error}");
    }
    assert!(build(options.with_softcap(Some(1e-18)), &|_| {}).is_ok());
    let sinks = |sink: f32| build(options, &move |e| e.sinks = Some(vec![sink]));
    assert!(sinks(-5e37).is_ok());
    assert!(matches!(sinks(-6e37), Err(CaseError::SinkRange { head: 0, .. })));
}

/// What soft cap, ALiBi and bias make of a score stays in range too.
#[test]
fn modified_scores_must_stay_in_range() {
    let heads = HeadGeometry::new(2, 2, 1).unwrap();
    let options = AttentionOptions::new(&heads);
    // Two rows at positions 1 and 2 of three keys.
    let build = |options: AttentionOptions, change: &dyn Fn(&mut CaseExtras)| {
        let mut extras = CaseExtras::default();
        change(&mut extras);
        let k = [1.0, 1.0, 1.0, 2.0, 1.0, 3.0];
        single(heads, options, &[1.0; 4], &k, &[1.0; 6])?.with_extras(extras)
    };
    let place = |case: Result<Case, CaseError>| match case {
        Err(CaseError::ScoreRange { row, head, key, found, limit }) if found > limit => (row, head, key),
        other => panic!("{other:?}"),
    };
    // The farthest key of the last row is two away.
    let slopes = |slope: f32| build(options, &move |e| e.alibi_slopes = Some(vec![0.0, slope]));
    assert!(slopes(-2.9e37).is_ok());
    assert_eq!(place(slopes(-3e37)), (1, 1, 0));
    assert_eq!(place(slopes(6e37)), (0, 1, 0));
    // A bias, also for a key that something else hides; -inf is none.
    let bias = |value: f32| {
        let mut values = [0.0; 12];
        values[6 + 4] = value;
        build(options.with_causal(true), &move |e| {
            e.bias = Some(tensor(&[2, 6], &values));
            e.mask = Some(vec![false; 6]);
        })
    };
    assert!(bias(5.8e37).is_ok() && bias(f32::NEG_INFINITY).is_ok());
    assert_eq!(place(bias(f32::MIN)), (1, 1, 1));
    // Together they are too much, where each alone is not.
    let both = |slope: f32, value: f32| {
        build(options, &move |e| {
            e.alibi_slopes = Some(vec![0.0, slope]);
            e.bias = Some(tensor(&[1, 6], &[value; 6]));
        })
    };
    assert!(both(2.9e37, 0.0).is_ok() && both(0.0, 5e37).is_ok());
    assert_eq!(place(both(2.9e37, 5e37)), (0, 1, 0));
    // A cap makes large scores small, unless they leave the range before.
    let large = |scale: f64, cap: f64| build(options.with_scale(scale).with_softcap(Some(cap)), &|_| {});
    assert!(large(1e37, 50.0).is_ok());
    assert_eq!(place(large(1e37, 0.5)), (0, 1, 2));
    assert!(matches!(large(1e38, 0.1), Err(CaseError::ScaleRange { .. })));
    match build(options.with_scale(1e30).with_softcap(Some(1e-9)), &|_| {}) {
        Err(CaseError::ScaleRange { found, .. }) => assert!((found / 1e39 - 1.0).abs() < 1e-6, "{found}"),
        other => panic!("{other:?}"),
    }
}
