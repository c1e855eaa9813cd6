//! Queries, keys and values that a language model made.

use std::path::Path;

use half::f16;
use paged_attention::Dtype;
use paged_attention_cases::{CaseSpec, Heads, Pool, Sequence, assemble};

use crate::common::{Tally, gpu, plain_options};

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
                let spec = CaseSpec::new(format!("real/{layer}, {what}"), HEADS, [])
                    .dtype(Dtype::F16)
                    .causal(true)
                    .scale(0.125)
                    .seed(41);
                let spec = if paged { spec.paged(Pool::new(16)) } else { spec.contiguous(Pool::new(16)) };
                let case = assemble(&spec, &sequences).unwrap();
                // The description holds no lengths from which pages could be counted.
                tally.check_case(gpu, &spec, &case, &plain_options(16));
            }
        }
    }
    tally.finish();
}
