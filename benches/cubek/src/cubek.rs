//! The other side: cubek-attention on a device of its own on the adapter that is handed in.

use std::time::Instant;

use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::prelude::Scalar;
use cubecl::std::tensor::TensorHandle;
use cubecl::wgpu::{RuntimeOptions, WgpuSetup, try_init_device};
use cubek_attention::forward::definition::{AttentionGlobalTypes, AttentionOptions};
use cubek_attention::forward::launch::{BlueprintStrategy, Strategy, launch_ref};
use paged_attention::{Dtype, Tensor, wgpu};
use paged_attention_bench_kit::{BenchError, Problem};

/// cubecl's client on one adapter.
pub struct Cubek {
    client: Client,
}

impl Cubek {
    /// Opens a device as cubecl does for itself: all features and limits of the adapter, less experimental features.
    ///
    /// # Errors
    /// [`BenchError::Device`].
    pub fn open(instance: &wgpu::Instance, adapter: &wgpu::Adapter) -> Result<Self, BenchError> {
        let left_out = wgpu::Features::MAPPABLE_PRIMARY_BUFFERS | wgpu::Features::all_experimental_mask();
        let (device, queue) = block_on(adapter.request_device(&wgpu::DeviceDescriptor {
            label: Some("cubecl"),
            required_features: adapter.features().difference(left_out),
            required_limits: adapter.limits(),
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            ..Default::default()
        }))
        .map_err(failed)?;
        let setup = WgpuSetup {
            instance: instance.clone(),
            adapter: adapter.clone(),
            device,
            queue,
            backend: adapter.get_info().backend,
        };
        let options = RuntimeOptions::try_default().map_err(failed)?;
        let device = try_init_device(setup, options).map_err(failed)?;
        Ok(Self { client: cubecl::Device::from(device).client() })
    }

    /// What compiles its kernels, as `wgpu<wgsl>`.
    pub fn runtime(&self) -> &'static str {
        self.client.name()
    }

    fn wait(&self) -> Result<(), BenchError> {
        block_on(self.client.sync()).map_err(failed)
    }
}

/// A call with its tensors on the device.
///
/// cubek has no head groups, but a tensor with one head serves all heads of a batch entry. So each KV head becomes a
/// batch entry of its own, whose heads are the query heads of the group: keys and values are neither copied nor read
/// more often than ours.
pub struct CubekCall {
    name: String,
    q: TensorHandle,
    k: TensorHandle,
    v: TensorHandle,
    out: TensorHandle,
    types: AttentionGlobalTypes,
    causal: bool,
    /// Sequences, query heads, query rows of each, head dimension of the values.
    out_shape: [usize; 4],
}

impl CubekCall {
    /// Puts the tensors of `problem` on the device, `[sequence, head, row, dim]`, and NaN into the output.
    ///
    /// # Errors
    /// [`BenchError::Shape`] for what cubek cannot do: sequences of different lengths, another dtype or scale.
    pub fn new(cubek: &Cubek, problem: &Problem) -> Result<Self, BenchError> {
        let refuse = |why: &str| BenchError::Shape { name: problem.name().to_owned(), why: why.to_owned() };
        let (case, heads, lengths) = (problem.case(), problem.spec().heads, problem.case().lengths());
        let Some((q_len, kv_len)) = lengths.first().copied() else {
            return Err(refuse("no sequence"));
        };
        if lengths.iter().any(|lengths| *lengths != (q_len, kv_len)) {
            return Err(refuse("cubek needs sequences of one length"));
        }
        if problem.dtype() != Dtype::F32 {
            return Err(refuse("the comparison is in f32"));
        }
        if case.options().scale != case.geometry().default_scale() {
            return Err(refuse("cubek's scale is 1 / sqrt(head_dim)"));
        }
        let seqs = lengths.len();
        let [q_len, kv_len, q_heads, kv_heads, head_dim, v_head_dim] =
            [q_len, kv_len, heads.q_heads, heads.kv_heads, heads.head_dim, heads.v_head_dim]
                .map(|count| count as usize);
        let (entries, group) = (seqs * kv_heads, q_heads / kv_heads);

        let client = &cubek.client;
        let f32 = f32::elem_type_native();
        let upload = |shape: [usize; 4], values: &[f32]| {
            TensorHandle::new_contiguous(shape, client.create_from_slice(bytemuck::cast_slice(values)), f32)
        };
        let packed = problem.packed()?;
        let [q, k, v] = [case.q(), packed.k, packed.v].map(Tensor::to_f32);
        let q = swap_middle(&q, [seqs, q_len, q_heads, head_dim]);
        let k = swap_middle(&k, [seqs, kv_len, kv_heads, head_dim]);
        let v = swap_middle(&v, [seqs, kv_len, kv_heads, v_head_dim]);
        let mut call = Self {
            name: problem.name().to_owned(),
            q: upload([entries, group, q_len, head_dim], &q),
            k: upload([entries, 1, kv_len, head_dim], &k),
            v: upload([entries, 1, kv_len, v_head_dim], &v),
            out: TensorHandle::empty(client, [entries, group, q_len, v_head_dim], f32),
            types: AttentionGlobalTypes::from_single_float_dtype(f32, AttentionGlobalTypes::mask_dtype(client)),
            // A single row sees every key.
            causal: case.options().causal && q_len > 1,
            out_shape: [seqs, q_heads, q_len, v_head_dim],
        };
        call.clear(cubek);
        Ok(call)
    }

    /// Takes an output full of NaN.
    pub fn clear(&mut self, cubek: &Cubek) {
        let words = vec![f32::NAN; self.out_shape.iter().product()];
        self.out.handle = cubek.client.create_from_slice(bytemuck::cast_slice(&words));
    }

    /// Seconds from the launch of one call to the end of its execution.
    ///
    /// # Errors
    /// [`BenchError::Device`]; [`BenchError::Shape`] where cubek refuses the call, with its reason.
    pub fn seconds(&self, cubek: &Cubek) -> Result<f64, BenchError> {
        cubek.wait()?;
        let start = Instant::now();
        launch_ref(
            Strategy::Unit(BlueprintStrategy::Inferred(())),
            &cubek.client,
            self.q.clone().binding(),
            self.k.clone().binding(),
            self.v.clone().binding(),
            None,
            self.out.clone().binding(),
            &self.types,
            AttentionOptions { causal: self.causal, ..Default::default() },
        )
        .map_err(|why| BenchError::Shape { name: self.name.clone(), why: format!("cubek: {why}") })?;
        cubek.wait()?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// The output, `[total_q, q_heads, v_head_dim]`.
    ///
    /// # Errors
    /// [`BenchError::Device`]; also where a launch failed.
    pub fn read(&self, cubek: &Cubek) -> Result<Vec<f32>, BenchError> {
        let bytes = cubek.client.read_one(self.out.handle.clone()).map_err(failed)?;
        Ok(swap_middle(&bytemuck::pod_collect_to_vec::<u8, f32>(&bytes), self.out_shape))
    }
}

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError::Device(format!("cubek: {error}"))
}

/// `[a, b, c, dim]` as `[a, c, b, dim]`.
fn swap_middle(from: &[f32], [a, b, c, dim]: [usize; 4]) -> Vec<f32> {
    let mut to = Vec::with_capacity(from.len());
    for x in 0..a {
        for z in 0..c {
            for y in 0..b {
                let start = ((x * b + y) * c + z) * dim;
                to.extend_from_slice(&from[start..start + dim]);
            }
        }
    }
    to
}

#[cfg(test)]
mod tests {
    use super::swap_middle;

    #[test]
    fn rows_and_heads_change_places() {
        let shape = [2, 2, 3, 2];
        let packed: Vec<f32> = (0..24).map(|x| x as f32).collect();
        let by_head = swap_middle(&packed, shape);
        assert_eq!(by_head[..12], [0., 1., 6., 7., 2., 3., 8., 9., 4., 5., 10., 11.]);
        assert_eq!(by_head[12..14], [12., 13.]);
        assert_eq!(swap_middle(&by_head, [2, 3, 2, 2]), packed);
    }
}
