//! Kernels emulated on the host in f32: the rules that the bound states, followed step by step, and mutants that break
//! them.

use half::{bf16, f16};
use paged_attention::{Case, Chains, Computed, Dtype, Report, verify};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// In what scores are summed.
#[derive(Clone, Copy, Debug)]
pub enum Scores {
    F32,
    F16,
}

/// To what weights are rounded before they are used.
#[derive(Clone, Copy, Debug)]
pub enum Weights {
    F32,
    F16,
    Bf16,
}

#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    pub step_keys: usize,
    pub split_keys: Option<usize>,
    pub scores: Scores,
    pub weights: Weights,
}

/// A result with its chains.
#[derive(Clone, Debug)]
pub struct Run {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
    pub out_dtype: Dtype,
    pub chains: Vec<Chains>,
}

impl Run {
    pub fn verify(&self, case: &Case) -> Report {
        let Self { out, lse, out_dtype, chains } = self;
        verify(case, &Computed { out, lse, out_dtype: *out_dtype, chains }).unwrap()
    }
}

/// The functions that WGSL lets be inaccurate.
struct Device(Option<StdRng>);

impl Device {
    /// `x` off by up to `units` in the last place.
    fn off(&mut self, x: f32, units: f32) -> f32 {
        match &mut self.0 {
            // Mostly one way, so that errors add up.
            Some(rng) => x + x * rng.random_range(-0.2..1.0_f32) * units * f32::EPSILON * 0.5,
            None => x,
        }
    }

    fn exp2(&mut self, x: f32) -> f32 {
        self.off(x.exp2(), 3.0 + 2.0 * x.abs())
    }

    fn div(&mut self, x: f32, y: f32) -> f32 {
        self.off(x / y, 2.5)
    }

    fn log2(&mut self, x: f32) -> f32 {
        match &mut self.0 {
            Some(rng) if (0.5..=2.0).contains(&x) => x.log2() + rng.random_range(-1.0..1.0_f32) * 0.99 / 2_097_152.0,
            _ => self.off(x.log2(), 3.0),
        }
    }
}

/// A split's `(m, l, acc)`; no maximum before the first key.
struct State {
    max: Option<f32>,
    sum: f32,
    acc: Vec<f32>,
}

impl Kernel {
    pub fn run(&self, case: &Case) -> Run {
        self.run_on(case, &mut Device(None))
    }

    /// The built-in functions are as inaccurate as they may be.
    pub fn run_on_poor_device(&self, case: &Case, seed: u64) -> Run {
        self.run_on(case, &mut Device(Some(StdRng::seed_from_u64(seed))))
    }

    fn run_on(&self, case: &Case, device: &mut Device) -> Run {
        let (geometry, options) = (case.geometry(), case.options());
        let (dim, v_dim, group) =
            (geometry.head_dim() as usize, geometry.v_head_dim() as usize, geometry.group() as usize);
        let factor = (options.scale * std::f64::consts::LOG2_E) as f32;
        let q = case.q().to_f32();
        let mut q_rows = q.chunks_exact(dim);
        let mut run = Run { out: vec![], lse: vec![], out_dtype: Dtype::F32, chains: vec![] };
        for (seq, (q_len, kv_len)) in case.lengths().into_iter().enumerate() {
            let kv = case.sequence_kv(seq).unwrap();
            run.chains.push(self.chains(dim, kv_len as usize));
            for row in 0..q_len {
                let seen = options.visible(q_len, kv_len, row).end as usize;
                for head in 0..geometry.q_heads() as usize {
                    let (k, v) = (&kv.k(head / group)[..seen * dim], &kv.v(head / group)[..seen * v_dim]);
                    let (out, lse) = self.row(device, q_rows.next().unwrap(), k, v, v_dim, factor);
                    run.out.extend(out);
                    run.lse.push(lse);
                }
            }
        }
        run
    }

    fn chains(&self, dim: usize, kv_len: usize) -> Chains {
        let split = self.split_keys.unwrap_or(kv_len).max(1);
        let (splits, steps) = (kv_len.div_ceil(split), split.div_ceil(self.step_keys));
        // A key's sum in its split, a rescale per step, and a rescale and a sum per fold.
        let accumulate = split.min(kv_len) + steps + 2 * splits;
        Chains { dot: dim as u32, step_keys: self.step_keys as u32, accumulate: accumulate as u32 }
    }

    fn row(&self, device: &mut Device, q: &[f32], k: &[f32], v: &[f32], v_dim: usize, factor: f32) -> (Vec<f32>, f32) {
        let dim = q.len();
        let split = self.split_keys.unwrap_or(usize::MAX / dim / v_dim);
        let mut whole = State { max: None, sum: 0.0, acc: vec![0.0; v_dim] };
        for (k, v) in k.chunks(split * dim).zip(v.chunks(split * v_dim)) {
            let part = self.split(device, q, k, v, v_dim, factor);
            let Some(part_max) = part.max else { continue };
            let max = whole.max.map_or(part_max, |max| max.max(part_max));
            let ours = whole.max.map_or(0.0, |old| rescale(device, old, max));
            let theirs = rescale(device, part_max, max);
            whole.sum = whole.sum * ours + part.sum * theirs;
            for (acc, part) in whole.acc.iter_mut().zip(&part.acc) {
                *acc = *acc * ours + part * theirs;
            }
            whole.max = Some(max);
        }
        let Some(max) = whole.max else { return (vec![0.0; v_dim], f32::NEG_INFINITY) };
        let out = whole.acc.iter().map(|acc| device.div(*acc, whole.sum)).collect();
        (out, (max + device.log2(whole.sum)) * std::f32::consts::LN_2)
    }

    fn split(&self, device: &mut Device, q: &[f32], k: &[f32], v: &[f32], v_dim: usize, factor: f32) -> State {
        let dim = q.len();
        let mut state = State { max: None, sum: 0.0, acc: vec![0.0; v_dim] };
        for (k, v) in k.chunks(self.step_keys * dim).zip(v.chunks(self.step_keys * v_dim)) {
            let scores: Vec<f32> = k.chunks_exact(dim).map(|k| self.dot(q, k) * factor).collect();
            let max = scores.iter().copied().chain(state.max).fold(f32::MIN, f32::max);
            if let Some(old) = state.max {
                let factor = rescale(device, old, max);
                state.sum *= factor;
                state.acc.iter_mut().for_each(|acc| *acc *= factor);
            }
            state.max = Some(max);
            for (score, v) in scores.iter().zip(v.chunks_exact(v_dim)) {
                let weight = device.exp2(score - max);
                let weight = match self.weights {
                    Weights::F32 => weight,
                    Weights::F16 => f16::from_f32(weight).to_f32(),
                    Weights::Bf16 => bf16::from_f32(weight).to_f32(),
                };
                state.sum += weight;
                state.acc.iter_mut().zip(v).for_each(|(acc, v)| *acc += weight * v);
            }
        }
        state
    }

    fn dot(&self, q: &[f32], k: &[f32]) -> f32 {
        let products = q.iter().zip(k);
        match self.scores {
            Scores::F32 => products.fold(0.0, |sum, (q, k)| sum + q * k),
            Scores::F16 => products.fold(f16::ZERO, |sum, (q, k)| f16::from_f32(sum.to_f32() + q * k)).to_f32(),
        }
    }
}

/// A maximum that stays multiplies by exactly 1.
fn rescale(device: &mut Device, old: f32, max: f32) -> f32 {
    if old == max { 1.0 } else { device.exp2(old - max) }
}
