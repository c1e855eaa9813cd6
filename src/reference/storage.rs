//! What the way into the pages may do to keys and values: rotation, rounding, quantisation.
//!
//! The pages hold `x'` in the place of `x`, an element of a key that was rotated exactly, or of a value, with
//!
//! ```text
//! abs(x' - x) <= floor + part * abs(x)
//! ```
//!
//! where `floor` belongs to the row and `part` to the type. With `largest` the largest magnitude of the row and `eps`
//! `2^-23`:
//!
//! | pages | `part` | `floor` |
//! | --- | --- | --- |
//! | as the new rows | 0 | 0 |
//! | f32 | 0 | `2^-126` |
//! | bf16 | `2^-8` | `2^-126` |
//! | f16 | `2^-11` | `2^-25` |
//! | int8 | 0 | `largest / 127 * (1/2 + 2^-12)`; `largest`, where that is below `2^-99` |
//! | fp8, of scale `s` | `2^-4 (1 + 2^-12)` | `2^-10 s (1 + 2^-12)`, and what `largest` is above `448 s` |
//!
//! All are rounded to nearest. New rows in f16 that are converted add `2^-14` to the floor, other types `2^-126`: WGSL lets
//! what is below the normal numbers be zero when it is read. int8: an element is off by half a step of `largest / 127`,
//! and `2^-12` of a step is more than what the scale, its inverse and their products bring, `127 * 7 eps`; fp8 alike.
//!
//! A rotation by the angle `a = p f` brings `floor` for its own roundings:
//!
//! ```text
//! magnitude * largest * (2 (3 eps + (a + 4) 2^-51) + eps) + 2^-123
//! ```
//!
//! a cosine and a sine rounded to f32, two products and a sum, and what float64 leaves of an angle; the last term is for
//! the exact keys, which are f32 here.

use crate::case::{Case, CaseError, KvSource};
use crate::geometry::Dtype;
use crate::kv::{FP8_MAX, INT8_MAX, KvDtype, Rotary};
use crate::runner::StoredKv;
use crate::tensor::Tensor;

/// `2^-23`.
const EPS: f64 = 1.0 / 8_388_608.0;

/// `2^-126`.
const TINY: f64 = f32::MIN_POSITIVE as f64;

/// Below this largest magnitude, 2^-99, a row may become zero.
const INT8_FLOOR: f64 = 1.577_721_810_442_023_6e-30;

/// More than what the arithmetic of a quantisation brings, relative to what rounding to the type does.
const ARITHMETIC: f64 = 1.0 / 4096.0;

/// How far the rows of one KV head of a sequence may be off.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RowErrors {
    /// `[kv_len]`.
    pub floor: Vec<f64>,
    pub part: f64,
}

/// What storing does to the keys and values of a case.
pub(crate) struct Storage<'a> {
    stored: &'a StoredKv,
    new: Dtype,
}

/// Rows of one KV head of a sequence, `[kv_len, dim]`: as they are, and as an exact rotation leaves them.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub new: &'a [f32],
    pub exact: &'a [f32],
    pub dim: usize,
}

impl<'a> Storage<'a> {
    pub(crate) fn new(case: &Case, stored: &'a StoredKv) -> Self {
        Self { stored, new: case.kv().dtype() }
    }

    /// The errors of the keys of one head of a sequence.
    pub(crate) fn key_errors(&self, kv_head: usize, rows: Rows<'_>) -> RowErrors {
        self.errors(self.stored.dtypes.k, self.stored.rotary.as_ref(), self.head_scale(kv_head, 0), rows)
    }

    /// The errors of its values, where they are no part of the keys.
    pub(crate) fn value_errors(&self, kv_head: usize, rows: Rows<'_>) -> RowErrors {
        self.errors(self.stored.dtypes.v, None, self.head_scale(kv_head, 1), rows)
    }

    fn head_scale(&self, kv_head: usize, which: usize) -> f64 {
        let scales = self.stored.head_scales.get(kv_head);
        scales.and_then(|scales| scales.get(which)).map_or(0.0, |scale| f64::from(*scale))
    }

    fn errors(&self, dtype: KvDtype, rotary: Option<&Rotary>, head_scale: f64, rows: Rows<'_>) -> RowErrors {
        let dim = rows.dim.max(1);
        if rotary.is_none() && dtype == KvDtype::from(self.new) {
            return RowErrors { floor: vec![0.0; rows.new.len() / dim], part: 0.0 };
        }
        let part = match dtype {
            KvDtype::F32 | KvDtype::Int8 => 0.0,
            KvDtype::Bf16 => 1.0 / 256.0,
            KvDtype::F16 => 1.0 / 2048.0,
            KvDtype::Fp8 => (1.0 + ARITHMETIC) / 16.0,
        };
        let read = if self.new == Dtype::F16 { F16_SMALLEST } else { TINY };
        let frequency = rotary.map_or(0.0, |rotary| rotary.frequencies().iter().copied().fold(0.0, f64::max));
        let largest = |row: &[f32]| f64::from(row.iter().fold(0.0_f32, |max, x| max.max(x.abs())));
        let pairs = rows.new.chunks_exact(dim).zip(rows.exact.chunks_exact(dim)).enumerate();
        let floors = pairs.map(|(position, (new, exact))| {
            let turn = rotary.map_or(0.0, |rotary| {
                let angle = position as f64 * frequency;
                let roundings = 2.0 * (3.0 * EPS + (angle + 4.0) * 2.0 * f64::EPSILON) + EPS;
                rotary.magnitude() * (largest(new) * roundings + 2.0 * read) + 8.0 * TINY
            });
            let brought = read + turn;
            let largest = largest(exact) + brought;
            let stored = match dtype {
                KvDtype::F32 | KvDtype::Bf16 => TINY,
                KvDtype::F16 => F16_SMALLEST / 2048.0,
                KvDtype::Int8 if largest < INT8_FLOOR => largest,
                KvDtype::Int8 => largest / f64::from(INT8_MAX) * (0.5 + ARITHMETIC),
                KvDtype::Fp8 => {
                    head_scale / 1024.0 * (1.0 + ARITHMETIC) + f64::max(0.0, largest - f64::from(FP8_MAX) * head_scale)
                }
            };
            brought * (1.0 + part) + stored
        });
        RowErrors { floor: floors.collect(), part }
    }
}

/// The smallest normal number in f16.
const F16_SMALLEST: f64 = 1.0 / 16_384.0;

/// `case` with its keys as an exact rotation leaves them, rounded to f32.
///
/// # Errors
/// [`CaseError`] if rotated keys lie outside the supported ranges.
pub(crate) fn rotated(case: &Case, rotary: &Rotary) -> Result<Case, CaseError> {
    let KvSource::Contiguous { k, v, kv_indptr } = case.kv() else { return Ok(case.clone()) };
    let geometry = case.geometry();
    let (kv_heads, dim) = (geometry.kv_heads() as usize, geometry.head_dim() as usize);
    let mut values = k.to_f32();
    let mut rows = values.chunks_exact_mut(dim * kv_heads);
    for (begin, end) in kv_indptr.iter().zip(kv_indptr.iter().skip(1)) {
        for (position, token) in (0..end - begin).zip(rows.by_ref()) {
            token.chunks_exact_mut(dim).for_each(|row| rotate(rotary, position, row));
        }
    }
    // The shape is the one that the values were read from.
    let tensor = |shape: &[usize], values: &[f32]| Tensor::from_f32(Dtype::F32, shape, values).ok();
    let k = tensor(k.shape(), &values);
    let v = match &k {
        Some(k) if geometry.is_latent() => Some(k.first_of_rows(geometry.v_head_dim() as usize)),
        _ => tensor(v.shape(), &v.to_f32()),
    };
    match (k, v) {
        (Some(k), Some(v)) => case.clone().with_kv(KvSource::Contiguous { k, v, kv_indptr: kv_indptr.clone() }),
        _ => Ok(case.clone()),
    }
}

/// Turns the pairs of a row in float64: as complex numbers, by `magnitude * e^(i position frequency)`.
pub fn rotate(rotary: &Rotary, position: u32, row: &mut [f32]) {
    for ([first, second], frequency) in rotary.shape().pairs().zip(rotary.frequencies()) {
        let (Some(re), Some(im)) = (row.get(first).copied(), row.get(second).copied()) else { continue };
        let (re, im) = (f64::from(re), f64::from(im));
        let (length, angle) = (rotary.magnitude() * re.hypot(im), im.atan2(re) + f64::from(position) * frequency);
        for (index, turned) in [(first, length * angle.cos()), (second, length * angle.sin())] {
            if let Some(element) = row.get_mut(index) {
                *element = turned as f32;
            }
        }
    }
}
