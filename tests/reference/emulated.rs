//! Kernels emulated on the host in f32: the rules that the bound states, followed step by step, and mutants that break
//! them.

use std::f64::consts::LOG2_E;

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

/// What a kernel may get wrong about the options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// The soft cap's tanh in f16.
    CapInF16,
    /// The argument of its exponential lacks `log2(e)`.
    CapBase,
    /// The capped score lacks `log2(e)`.
    CapUnits,
    /// The cap comes after ALiBi and bias.
    CapLast,
    /// ALiBi counts from the key after the row's own.
    AlibiOffByOne,
    /// ALiBi lacks `log2(e)`.
    AlibiUnits,
    /// Positions are counted from the first query row.
    AlibiTopLeft,
    /// The slope of the neighbouring head.
    AlibiHead,
    /// The bias lacks `log2(e)`.
    BiasUnits,
    /// The bias of the neighbouring head.
    BiasHead,
    /// The sink lacks `log2(e)`.
    SinkUnits,
    /// Each split adds the sink.
    SinkPerSplit,
    /// A sink above the maximum rescales the sum, but not the accumulator.
    SinkWithoutRescale,
    /// The sink does not reach the log-sum-exp.
    SinkNotInLse,
    /// One key more or less at an end of the window.
    WindowLeftLonger,
    WindowLeftShorter,
    WindowRightLonger,
    /// The mask's row of the next query row.
    MaskRow,
    /// A hidden key takes part with a weight of `exp2(-10 - m)`.
    MaskByAddition,
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
    pub fault: Fault,
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

    /// `a * b + c`, fused, or as a product and a sum with errors of their own.
    fn fma(&mut self, a: f32, b: f32, c: f32) -> f32 {
        match &self.0 {
            None => a.mul_add(b, c),
            Some(_) => {
                let product = self.off(a * b, 0.5);
                self.off(product + c, 0.5)
            }
        }
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

/// The options as one row sees them: constants in f32, in units of log2.
struct RowOptions {
    v_dim: usize,
    scale: f64,
    /// `[kv_len]`.
    sees: Vec<bool>,
    position: i64,
    softcap: Option<f64>,
    slope: Option<f32>,
    bias: Option<Vec<f32>>,
    bias_factor: f32,
    sink: Option<f32>,
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
        let geometry = case.geometry();
        let (dim, group) = (geometry.head_dim() as usize, geometry.group() as usize);
        let q = case.q().to_f32();
        let mut q_rows = q.chunks_exact(dim);
        let mut run = Run { out: vec![], lse: vec![], out_dtype: Dtype::F32, chains: vec![] };
        for (seq, (q_len, kv_len)) in case.lengths().into_iter().enumerate() {
            let kv = case.sequence_kv(seq).unwrap();
            run.chains.push(self.chains(dim, kv_len as usize));
            for row in 0..q_len {
                for head in 0..geometry.q_heads() as usize {
                    let (k, v) = (kv.k(head / group), kv.v(head / group));
                    let options = self.options(case, seq, row, head);
                    let (out, lse) = self.row(device, q_rows.next().unwrap(), k, v, &options);
                    run.out.extend(out);
                    run.lse.push(lse);
                }
            }
        }
        run
    }

    /// What a row has to know, and what the fault makes of it.
    fn options(&self, case: &Case, seq: usize, row: u32, head: usize) -> RowOptions {
        let (q_len, kv_len) = case.lengths()[seq];
        let (options, extras, heads) = (case.options(), case.extras(), case.geometry().q_heads() as usize);
        let longer = |side: Option<u32>, by: i64| side.map(|side| (i64::from(side) + by).max(0) as u32);
        let (left, right) = match self.fault {
            Fault::WindowLeftLonger => (longer(options.window_left, 1), options.window_right),
            Fault::WindowLeftShorter => (longer(options.window_left, -1), options.window_right),
            Fault::WindowRightLonger => (options.window_left, longer(options.window_right, 1)),
            _ => (options.window_left, options.window_right),
        };
        let range = options.with_window(left, right).visible(q_len, kv_len, row);
        let mask_row = if self.fault == Fault::MaskRow { (row + 1) % q_len } else { row };
        let bias_head = if self.fault == Fault::BiasHead { (head + 1) % heads } else { head };
        let alibi_head = if self.fault == Fault::AlibiHead { (head + 1) % heads } else { head };
        let (mask, bias) = (case.mask_row(seq, mask_row), case.bias_row(seq, row, bias_head));
        let sees = (0..kv_len as usize).map(|key| {
            range.contains(&(key as u32))
                && mask.is_none_or(|mask| mask[key])
                && bias.as_ref().is_none_or(|bias| bias[key] > f32::NEG_INFINITY)
        });
        let position = match self.fault {
            Fault::AlibiTopLeft => i64::from(row),
            Fault::AlibiOffByOne => i64::from(kv_len) - i64::from(q_len) + i64::from(row) - 1,
            _ => i64::from(kv_len) - i64::from(q_len) + i64::from(row),
        };
        let units = |fault| if self.fault == fault { 1.0 } else { LOG2_E };
        RowOptions {
            v_dim: case.geometry().v_head_dim() as usize,
            scale: options.scale,
            sees: sees.collect(),
            position,
            softcap: options.softcap,
            slope: extras
                .alibi_slopes
                .as_ref()
                .map(|slopes| (f64::from(slopes[alibi_head]) * units(Fault::AlibiUnits)) as f32),
            bias,
            bias_factor: units(Fault::BiasUnits) as f32,
            sink: extras.sinks.as_ref().map(|sinks| sinks[head] * units(Fault::SinkUnits) as f32),
        }
    }

    fn chains(&self, dim: usize, kv_len: usize) -> Chains {
        let split = self.split_keys.unwrap_or(kv_len).max(1);
        let (splits, steps) = (kv_len.div_ceil(split), split.div_ceil(self.step_keys));
        // A key's sum in its split, a rescale per step, and a rescale and a sum per fold.
        let accumulate = split.min(kv_len) + steps + 2 * splits;
        Chains {
            dot: dim as u32,
            step_keys: self.step_keys as u32,
            accumulate: accumulate as u32,
            scaled: false,
            order: Vec::new(),
        }
    }

    fn row(&self, device: &mut Device, q: &[f32], k: &[f32], v: &[f32], options: &RowOptions) -> (Vec<f32>, f32) {
        let v_dim = options.v_dim;
        let keys = options.sees.len();
        let split = self.split_keys.unwrap_or(keys).max(1);
        let mut whole = State { max: None, sum: 0.0, acc: vec![0.0; v_dim] };
        for begin in (0..keys).step_by(split) {
            let mut part = self.split(device, q, k, v, begin..keys.min(begin + split), options);
            if self.fault == Fault::SinkPerSplit {
                join_sink(device, &mut part, options.sink);
            }
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
        let without = whole.max.map(|max| (max + device.log2(whole.sum)) * std::f32::consts::LN_2);
        let acc = whole.acc.clone();
        if self.fault != Fault::SinkPerSplit {
            join_sink(device, &mut whole, options.sink);
        }
        if self.fault == Fault::SinkWithoutRescale {
            whole.acc = acc;
        }
        let Some(max) = whole.max else { return (vec![0.0; v_dim], f32::NEG_INFINITY) };
        let out = whole.acc.iter().map(|acc| device.div(*acc, whole.sum)).collect();
        let lse = (max + device.log2(whole.sum)) * std::f32::consts::LN_2;
        (out, if self.fault == Fault::SinkNotInLse { without.unwrap_or(f32::NEG_INFINITY) } else { lse })
    }

    fn split(
        &self,
        device: &mut Device,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        keys: std::ops::Range<usize>,
        options: &RowOptions,
    ) -> State {
        let (dim, v_dim) = (q.len(), options.v_dim);
        let mut state = State { max: None, sum: 0.0, acc: vec![0.0; v_dim] };
        for begin in keys.clone().step_by(self.step_keys) {
            let step = begin..keys.end.min(begin + self.step_keys);
            let hidden = self.fault == Fault::MaskByAddition;
            let scores: Vec<(usize, f32)> = step
                .filter(|key| options.sees[*key] || hidden)
                .map(|key| {
                    let score = self.score(device, q, &k[key * dim..][..dim], key, options);
                    (key, if options.sees[key] { score } else { score - 10.0 })
                })
                .collect();
            if scores.is_empty() {
                continue;
            }
            let max = scores.iter().map(|(_, score)| *score).chain(state.max).fold(f32::MIN, f32::max);
            if let Some(old) = state.max {
                let factor = rescale(device, old, max);
                state.sum *= factor;
                state.acc.iter_mut().for_each(|acc| *acc *= factor);
            }
            state.max = Some(max);
            for (key, score) in scores {
                let weight = device.exp2(score - max);
                let weight = match self.weights {
                    Weights::F32 => weight,
                    Weights::F16 => f16::from_f32(weight).to_f32(),
                    Weights::Bf16 => bf16::from_f32(weight).to_f32(),
                };
                state.sum += weight;
                let v = &v[key * v_dim..][..v_dim];
                state.acc.iter_mut().zip(v).for_each(|(acc, v)| *acc += weight * v);
            }
        }
        state
    }

    /// In units of log2, by the rules of the bound.
    fn score(&self, device: &mut Device, q: &[f32], k: &[f32], key: usize, options: &RowOptions) -> f32 {
        let add = |device: &mut Device, mut score: f32| {
            if let Some(slope) = options.slope {
                score = device.fma(slope, (key as i64 - options.position) as f32, score);
            }
            if let Some(bias) = &options.bias {
                score = device.fma(bias[key], options.bias_factor, score);
            }
            score
        };
        let Some(cap) = options.softcap else {
            let score = self.dot(q, k) * (options.scale * LOG2_E) as f32;
            return add(device, score);
        };
        let mut x = self.dot(q, k) * (options.scale / cap) as f32;
        if self.fault == Fault::CapLast {
            x = add(device, x * (cap * LOG2_E) as f32) / (cap * LOG2_E) as f32;
        }
        let base = if self.fault == Fault::CapBase { 2.0 } else { (2.0 * LOG2_E) as f32 };
        let y = device.off(x.abs() * base, 0.5);
        let e = device.exp2(-y);
        let (above, below) = (device.off(1.0 - e, 0.5), device.off(1.0 + e, 0.5));
        let mut t = device.div(above, below);
        if self.fault == Fault::CapInF16 {
            t = f16::from_f32(t).to_f32();
        }
        let units = if self.fault == Fault::CapUnits { cap } else { cap * LOG2_E };
        let score = device.off(t.copysign(x) * units as f32, 0.5);
        if self.fault == Fault::CapLast { score } else { add(device, score) }
    }

    fn dot(&self, q: &[f32], k: &[f32]) -> f32 {
        let products = q.iter().zip(k);
        match self.scores {
            Scores::F32 => products.fold(0.0, |sum, (q, k)| sum + q * k),
            Scores::F16 => products.fold(f16::ZERO, |sum, (q, k)| f16::from_f32(sum.to_f32() + q * k)).to_f32(),
        }
    }
}

/// `m' = max(m, sink)`, as with one more key that has no value.
fn join_sink(device: &mut Device, state: &mut State, sink: Option<f32>) {
    let Some(sink) = sink else { return };
    let max = state.max.map_or(sink, |max| max.max(sink));
    if let Some(old) = state.max {
        let factor = rescale(device, old, max);
        state.sum *= factor;
        state.acc.iter_mut().for_each(|acc| *acc *= factor);
    }
    state.sum += rescale(device, sink, max);
    state.max = Some(max);
}

/// A maximum that stays multiplies by exactly 1.
fn rescale(device: &mut Device, old: f32, max: f32) -> f32 {
    if old == max { 1.0 } else { device.exp2(old - max) }
}
