//! Queries, keys and values that a language model made.

use std::path::Path;

use half::f16;
use paged_attention::{Dtype, KvDtype, KvDtypes, KvLayout, PageSize, RunOptions};
use paged_attention_cases::{CaseSpec, Heads, Pool, Sequence, assemble};

use crate::common::{Tally, gpu, plain_options, say};

const HEADS: Heads = Heads::new(9, 3, 64);
const TOKENS: u32 = 600;

fn load(layer: &str) -> Sequence {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/smollm2-135m-{layer}.safetensors"));
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let read = |name: &str, heads: u32| -> Vec<f32> {
        let tensor = file.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), safetensors::Dtype::F16);
        assert_eq!(tensor.shape(), [TOKENS as usize, heads as usize, 64]);
        tensor.data().chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
    };
    Sequence {
        q_len: TOKENS,
        kv_len: TOKENS,
        kv_stream: 0,
        q: read("q", HEADS.q_heads),
        k: read("k", HEADS.kv_heads),
        v: read("v", HEADS.kv_heads),
        mask: None,
        bias: None,
    }
}

fn spec(name: String) -> CaseSpec {
    CaseSpec::new(name, HEADS, []).dtype(Dtype::F16).causal(true).scale(0.125).seed(41)
}

/// The whole prompt, the decode of its last rows and of some before, and a second half over a cached first.
#[test]
fn a_language_models_tensors() {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new("real");
    for layer in ["layer00", "layer20"] {
        let whole = load(layer);
        let single = |t: u32| whole.chunk(&HEADS, t - 1, t, t);
        let batches = [
            ("whole", vec![whole.clone()]),
            ("last rows", (TOKENS - 24..=TOKENS).map(single).collect()),
            ("decodes", [1, 2, 15, 16, 17, 64, 255, 256, 257, 511, 512, 513].map(single).to_vec()),
            ("halves", vec![whole.chunk(&HEADS, 0, 300, 300), whole.chunk(&HEADS, 300, TOKENS, TOKENS)]),
        ];
        for (what, sequences) in batches {
            for paged in [false, true] {
                let spec = spec(format!("real/{layer}, {what}"));
                let spec = if paged { spec.paged(Pool::new(16)) } else { spec.contiguous(Pool::new(16)) };
                let case = assemble(&spec, &sequences).unwrap();
                // The description holds no lengths from which pages could be counted.
                tally.check_case(gpu, &spec, &case, &plain_options(16));
            }
        }
    }
    tally.finish();
}

/// Bytes of a token's keys and values in pages of 16.
fn bytes_per_token(kv: KvDtypes) -> u64 {
    let layout = KvLayout::new(HEADS.geometry().unwrap(), kv, PageSize::new(16).unwrap(), 1).unwrap();
    layout.page_bytes() / 16
}

/// In every variant: what 8 bits hold of keys and values, and what that does to the result, is inside the bound of storage;
/// attention over the stored ones is inside its own.
#[test]
fn a_language_models_tensors_in_eight_bits() {
    let Some(gpu) = gpu() else { return };
    let f16 = bytes_per_token(KvDtype::F16.into());
    // 3 heads of 64 elements each for keys and values.
    assert_eq!(f16, 2 * 3 * 64 * 2);
    let mut tally = Tally::new("real-stored");
    for (kv, bytes) in [
        // A scale of 4 bytes for each row.
        (KvDtypes::from(KvDtype::Int8), 2 * 3 * (64 + 4)),
        (KvDtypes::from(KvDtype::Fp8), 2 * 3 * 64),
        (KvDtypes { k: KvDtype::F16, v: KvDtype::Int8 }, 3 * (64 * 2 + 64 + 4)),
    ] {
        let found = bytes_per_token(kv);
        say(&format!("{kv}: {found} bytes per token, {:.3} of the {f16} in f16", found as f64 / f16 as f64));
        assert_eq!(found, bytes, "{kv}");
        for layer in ["layer00", "layer20"] {
            let whole = load(layer);
            let decodes = [1, 17, 256, 513, TOKENS].map(|t| whole.chunk(&HEADS, t - 1, t, t)).to_vec();
            let mut batches = vec![("decodes", decodes)];
            // What the test waits for is float64, most of it.
            if kv.k == KvDtype::Int8 {
                batches.push(("whole", vec![whole]));
            }
            for (what, sequences) in batches {
                let spec = spec(format!("real/{layer}, {what}, {kv}")).contiguous(Pool::new(16));
                let case = assemble(&spec, &sequences).unwrap();
                let options = RunOptions { kv: Some(kv), ..plain_options(16) };
                tally.check_every_variant(gpu, &spec, &case, &options);
            }
        }
    }
    tally.finish();
}
