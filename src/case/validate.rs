//! The checks of a case: shapes, indices, owned values, ranges, and the work that judging it takes.

use std::f64::consts::LOG2_E;

use super::{
    CASE_BYTES_MAX, CASE_SCORES_MAX, Case, CaseError, CaseExtras, KvSource, OwnedRun, SCORE_LOG2_MAX,
    SCRATCH_BYTES_PER_KEY, SEQUENCE_BYTES_MAX,
};
use crate::batch::{Batch, BatchError, NO_PAGE, check_indptr};
use crate::geometry::{Dtype, GeometryError, PageSize};
use crate::kv::{FP8_MAX, INT8_MAX, KvDtype, KvDtypes};
use crate::tensor::Tensor;

/// The largest magnitude of a score, in natural units and less room for rounding.
const SCORE_MAX: f64 = SCORE_LOG2_MAX / LOG2_E / ROUNDING_ROOM;

/// The largest number in f16.
const F16_MAX: f64 = 65_504.0;

/// Room for the roundings of f32 sums: what is checked in exact arithmetic must stay in range in f32 as well,
/// where a chain of 2 * 256 roundings of 2^-23 each adds less than 2^-13.
const ROUNDING_ROOM: f64 = 1.0 + 1.0 / 4096.0;

impl Case {
    pub(super) fn validate(&self) -> Result<(), CaseError> {
        let scale = self.options.scale;
        if !scale.is_finite() {
            return Err(GeometryError::Scale { found: scale }.into());
        }
        if let Some(found) = self.options.softcap_outside() {
            return Err(CaseError::SoftcapRange { found });
        }
        let (found, limit) = (self.query_factor().copysign(scale), f64::from(f32::MAX) / LOG2_E / ROUNDING_ROOM);
        if found.abs() > limit {
            return Err(CaseError::ScaleRange { found, limit });
        }
        self.validate_shapes()?;
        self.validate_latent()?;
        self.validate_size()?;
        self.validate_finite()?;
        self.validate_values()?;
        self.validate_range()
    }

    /// Slots that nobody owns are compared too: a pool has them once.
    fn validate_latent(&self) -> Result<(), CaseError> {
        let (k_name, k, v_name, v) = match &self.kv {
            KvSource::Contiguous { k, v, .. } => ("k", k, "v", v),
            KvSource::Paged { k_pages, v_pages, .. } => ("k_pages", k_pages, "v_pages", v_pages),
        };
        let v_head_dim = self.geometry.v_head_dim();
        if self.geometry.is_latent() && k.first_of_rows(v_head_dim as usize) != *v {
            return Err(CaseError::LatentValues { k: k_name, v: v_name, v_head_dim });
        }
        Ok(())
    }

    /// The checks that extras add to those of [`Case::validate`].
    pub(super) fn validate_extras(&self) -> Result<(), CaseError> {
        let (q_heads, entries) = (self.geometry.q_heads() as usize, self.score_indptr.last().copied().unwrap_or(0));
        let CaseExtras { alibi_slopes, sinks, mask, bias } = &self.extras;
        let shape = |tensor, found: &[usize], needed| CaseError::Shape { tensor, found: found.to_vec(), needed };
        for (tensor, values) in [("alibi_slopes", alibi_slopes), ("sinks", sinks)] {
            let Some(values) = values else { continue };
            if values.len() != q_heads {
                return Err(shape(tensor, &[values.len()], format!("[{q_heads}] (`q_heads`)")));
            }
            if let Some((at, value)) = values.iter().copied().enumerate().find(|(_, x)| !x.is_finite()) {
                return Err(CaseError::NotFinite { tensor, index: vec![at], value });
            }
        }
        if let Some(mask) = mask.as_ref().filter(|mask| mask.len() as u64 != entries) {
            return Err(shape("mask", &[mask.len()], format!("[{entries}] (the sum of q_len * kv_len)")));
        }
        if let Some(bias) = bias {
            match *bias.shape() {
                [heads, found] if (heads == 1 || heads == q_heads) && found as u64 == entries => {}
                _ => {
                    let needed = format!("[1 or {q_heads}, {entries}] (heads, the sum of q_len * kv_len)");
                    return Err(shape("bias", bias.shape(), needed));
                }
            }
            if bias.dtype() == Dtype::Bf16 {
                return Err(CaseError::BiasDtype { found: bias.dtype() });
            }
            for (head, values) in bias_heads(bias).enumerate() {
                let bad = |x: &f32| x.is_nan() || *x == f32::INFINITY;
                if let Some((at, value)) = values.iter().copied().enumerate().find(|(_, x)| bad(x)) {
                    return Err(CaseError::NotFinite { tensor: "bias", index: vec![head, at], value });
                }
            }
        }
        for (head, sink) in sinks.iter().flatten().enumerate() {
            if f64::from(sink.abs()) > SCORE_MAX {
                return Err(CaseError::SinkRange { head, found: f64::from(*sink), limit: SCORE_MAX });
            }
        }
        self.validate_range()
    }

    /// The magnitude of what a kernel multiplies `q . k` by: the scale, over the soft cap if there is one.
    fn query_factor(&self) -> f64 {
        self.options.scale.abs() / self.options.softcap.unwrap_or(1.0)
    }

    /// Whether every output fits into `dtype`: an output is a mean of values.
    ///
    /// # Errors
    /// [`CaseError::OutRange`].
    pub fn validate_out(&self, dtype: Dtype) -> Result<(), CaseError> {
        let limit = match dtype {
            Dtype::F16 => F16_MAX,
            Dtype::F32 | Dtype::Bf16 => return Ok(()),
        };
        let tensor = match self.kv {
            KvSource::Contiguous { .. } => "v",
            KvSource::Paged { .. } => "v_pages",
        };
        let mut found = 0.0;
        self.for_value_maxima(|_, _, _, max| {
            found = f64::max(found, max);
            Ok(())
        })?;
        if found > limit { Err(CaseError::OutRange { tensor, found, dtype, limit }) } else { Ok(()) }
    }

    /// Whether the kernels can compute with keys and values that are stored in `dtypes`.
    ///
    /// # Errors
    /// [`CaseError::StoredRange`] for a value that the type does not reach; [`CaseError::StoredDotRange`] if a dot product
    /// may overflow before it is multiplied by the key's scale.
    pub(crate) fn validate_stored(&self, dtypes: KvDtypes) -> Result<(), CaseError> {
        let mut stored = [dtypes.k, dtypes.v].into_iter();
        self.for_kv(|tensor, elements, rows| {
            if stored.next() != Some(KvDtype::F16) || elements.dtype() == Dtype::F16 {
                return Ok(());
            }
            match find(elements, rows, |x| f64::from(x.abs()) > F16_MAX) {
                Some((index, value)) => {
                    Err(CaseError::StoredRange { tensor, index, value, dtype: Dtype::F16, limit: F16_MAX })
                }
                None => Ok(()),
            }
        })?;
        let largest = f64::from(match dtypes.k {
            KvDtype::Int8 => INT8_MAX,
            KvDtype::Fp8 => FP8_MAX,
            KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => return Ok(()),
        });
        let limit = f64::from(f32::MAX) / LOG2_E / ROUNDING_ROOM;
        let (q, factor, q_heads) = (self.q.to_f32(), self.query_factor(), self.geometry.q_heads() as usize);
        for (index, q) in q.chunks_exact(self.geometry.head_dim() as usize).enumerate() {
            let sum: f64 = q.iter().map(|x| f64::from(x.abs())).sum();
            let found = sum * largest * factor.max(1.0);
            if found > limit {
                let (row, head) = (index / q_heads, index % q_heads);
                return Err(CaseError::StoredDotRange { row, head, largest, found, limit });
            }
        }
        Ok(())
    }

    /// Bytes that the reference takes for a sequence of `kv_len` keys, but for what it keeps beside a row.
    pub(crate) fn gathered_bytes(&self, kv_len: u32) -> u128 {
        let dims = u128::from(self.geometry.head_dim()) + u128::from(self.geometry.v_head_dim());
        // Each key and value, and one maximum per KV head and dimension.
        let per_head = match kv_len {
            0 => 0,
            _ => u128::from(kv_len) * dims * 4 + dims * 8,
        };
        per_head * u128::from(self.geometry.kv_heads())
    }

    /// Refuses what no check would come to the end of. Sequences without query rows cost nothing.
    fn validate_size(&self) -> Result<(), CaseError> {
        let (mut scores, mut bytes) = (0, 0);
        for (seq, (q_len, kv_len)) in self.lengths().into_iter().enumerate() {
            if q_len == 0 {
                continue;
            }
            scores += u128::from(q_len) * u128::from(kv_len) * u128::from(self.geometry.q_heads());
            let own = self.gathered_bytes(kv_len);
            bytes += own;
            let with_scratch = own + u128::from(kv_len) * u128::from(SCRATCH_BYTES_PER_KEY);
            if with_scratch > SEQUENCE_BYTES_MAX.into() {
                let what = "bytes of keys and values in f32, with what a check keeps beside them";
                return Err(CaseError::TooLarge {
                    what,
                    seq: Some(seq),
                    found: with_scratch,
                    limit: SEQUENCE_BYTES_MAX,
                });
            }
        }
        for (what, found, limit) in [
            ("scores (query rows times keys times query heads, over all sequences)", scores, CASE_SCORES_MAX),
            ("bytes of keys and values in f32 (over all sequences, shared pages counted anew)", bytes, CASE_BYTES_MAX),
        ] {
            if found > limit.into() {
                return Err(CaseError::TooLarge { what, seq: None, found, limit });
            }
        }
        Ok(())
    }

    /// `(sequence, keys, KV head, largest magnitude of a value)` of everything that query rows can see.
    fn for_value_maxima(
        &self,
        mut each: impl FnMut(usize, u32, usize, f64) -> Result<(), CaseError>,
    ) -> Result<(), CaseError> {
        let (KvSource::Contiguous { v, .. } | KvSource::Paged { v_pages: v, .. }) = &self.kv;
        let dim = self.geometry.v_head_dim() as usize;
        let width = self.geometry.kv_heads() as usize * dim;
        let (mut row_values, mut maxima) = (Vec::with_capacity(width), Vec::new());
        for (seq, (q_len, kv_len)) in self.lengths().into_iter().enumerate() {
            let Some((_, runs)) = self.owned_runs(seq).filter(|_| q_len > 0 && kv_len > 0) else {
                continue;
            };
            maxima.clear();
            maxima.resize(self.geometry.kv_heads() as usize, 0.0_f32);
            for row in runs.filter_map(OwnedRun::rows).flatten() {
                row_values.clear();
                // The shapes have been checked, so that the row is there.
                let _ = v.extend_f32(row * width, width, &mut row_values);
                for (max, values) in maxima.iter_mut().zip(row_values.chunks_exact(dim)) {
                    *max = values.iter().fold(*max, |max, x| max.max(x.abs()));
                }
            }
            for (head, max) in maxima.iter().enumerate() {
                each(seq, kv_len, head, f64::from(*max))?;
            }
        }
        Ok(())
    }

    fn validate_values(&self) -> Result<(), CaseError> {
        let limit = f64::from(f32::MAX) / ROUNDING_ROOM;
        self.for_value_maxima(|seq, kv_len, kv_head, found| {
            let sum = f64::from(kv_len) * found;
            if sum > limit {
                return Err(CaseError::ValueRange { seq, kv_head, kv_len, found, sum, limit });
            }
            Ok(())
        })
    }

    fn validate_shapes(&self) -> Result<(), CaseError> {
        let geometry = &self.geometry;
        let (q_heads, kv_heads) = (geometry.q_heads() as usize, geometry.kv_heads() as usize);
        let (head_dim, v_head_dim) = (geometry.head_dim() as usize, geometry.v_head_dim() as usize);
        let shape = |tensor: &'static str, found: &Tensor, needed: String| CaseError::Shape {
            tensor,
            found: found.shape().to_vec(),
            needed,
        };
        let total_q = match *self.q.shape() {
            [rows, heads, dim] if heads == q_heads && dim == head_dim => rows,
            _ => return Err(shape("q", &self.q, format!("[total_q, {q_heads}, {head_dim}]"))),
        };
        check_indptr("q_indptr", &self.q_indptr, total_q)?;
        let same_dtype = |tensor: &'static str, k: &Tensor, v: &Tensor| {
            if k.dtype() == v.dtype() {
                Ok(())
            } else {
                Err(CaseError::KvDtype { tensor, found: v.dtype(), needed: k.dtype() })
            }
        };
        match &self.kv {
            KvSource::Contiguous { k, v, kv_indptr } => {
                let total_kv = match *k.shape() {
                    [rows, heads, dim] if heads == kv_heads && dim == head_dim => rows,
                    _ => return Err(shape("k", k, format!("[total_kv, {kv_heads}, {head_dim}]"))),
                };
                if *v.shape() != [total_kv, kv_heads, v_head_dim] {
                    return Err(shape("v", v, format!("[{total_kv}, {kv_heads}, {v_head_dim}]")));
                }
                same_dtype("v", k, v)?;
                check_indptr("kv_indptr", kv_indptr, total_kv)?;
                if kv_indptr.len() != self.q_indptr.len() {
                    return Err(CaseError::Batch(BatchError::Length {
                        tensor: "kv_indptr",
                        found: kv_indptr.len(),
                        needed: self.q_indptr.len(),
                        why: "as many as `q_indptr` has",
                    }));
                }
            }
            KvSource::Paged { k_pages, v_pages, page_indptr, page_ids, kv_len } => {
                let (pages, tokens) = match *k_pages.shape() {
                    [pages, tokens, heads, dim] if heads == kv_heads && dim == head_dim => (pages, tokens),
                    _ => {
                        let needed = format!("[pages, page_size, {kv_heads}, {head_dim}]");
                        return Err(shape("k_pages", k_pages, needed));
                    }
                };
                if *v_pages.shape() != [pages, tokens, kv_heads, v_head_dim] {
                    let needed = format!("[{pages}, {tokens}, {kv_heads}, {v_head_dim}]");
                    return Err(shape("v_pages", v_pages, needed));
                }
                same_dtype("v_pages", k_pages, v_pages)?;
                let (Ok(page_count), Ok(tokens)) = (u32::try_from(pages), u32::try_from(tokens)) else {
                    let needed = format!("at most {} pages of at most as many tokens", u32::MAX);
                    return Err(shape("k_pages", k_pages, needed));
                };
                let page_size = PageSize::new(tokens)?;
                let batch = Batch { q_indptr: &self.q_indptr, page_indptr, page_ids, kv_len };
                batch.validate(page_size, page_count)?;
                self.check_missing_pages(page_size, page_count, (page_indptr, page_ids))?;
            }
        }
        Ok(())
    }

    /// Refuses a page that is not there where a row may see its keys.
    fn check_missing_pages(
        &self,
        page_size: PageSize,
        page_count: u32,
        (page_indptr, page_ids): (&[u32], &[u32]),
    ) -> Result<(), BatchError> {
        for ((q_len, kv_len), begin) in self.lengths().into_iter().zip(page_indptr) {
            let Some(last_row) = q_len.checked_sub(1) else { continue };
            // Both ends of what a row sees rise with its position.
            let reach = |row| self.options.visible(q_len, kv_len, row);
            let (start, end) = (reach(0).start, reach(last_row).end);
            let needed = start / page_size.get()..page_size.pages_for(end);
            let (first, count) = (*begin as usize + needed.start as usize, needed.len());
            let pages = page_ids.iter().enumerate().skip(first).take(count);
            if let Some((index, found)) = pages.into_iter().find(|(_, page)| **page == NO_PAGE) {
                return Err(BatchError::PageId { index, found: *found, page_count });
            }
        }
        Ok(())
    }

    /// How many slots of each page some sequence owns, `[pages]`; a page's owned slots are its first ones. None for
    /// contiguous keys and values.
    pub(crate) fn owned_slots(&self) -> Vec<u32> {
        match &self.kv {
            KvSource::Contiguous { .. } => Vec::new(),
            KvSource::Paged { k_pages, page_indptr, page_ids, kv_len, .. } => {
                let page_size = self.page_size().map_or(0, PageSize::get) as usize;
                owned_slots(k_pages.shape(), page_size, (page_indptr, page_ids, kv_len))
            }
        }
    }

    /// Calls `each` with the name of the keys, the tensor and its owned rows, then alike for the values. A row is everything
    /// under the first axis or, in pages, the first two.
    fn for_kv(
        &self,
        mut each: impl FnMut(&'static str, &Tensor, &mut dyn Iterator<Item = usize>) -> Result<(), CaseError>,
    ) -> Result<(), CaseError> {
        match &self.kv {
            KvSource::Contiguous { k, v, .. } => {
                let rows = 0..k.shape().first().copied().unwrap_or(0);
                each("k", k, &mut rows.clone())?;
                each("v", v, &mut rows.clone())
            }
            KvSource::Paged { k_pages, v_pages, .. } => {
                // Sequences may share pages: every slot is looked at once.
                let page_size = self.page_size().map_or(0, PageSize::get) as usize;
                let rows = self.owned_slots();
                let rows = || {
                    let pages = rows.iter().enumerate();
                    pages.flat_map(|(page, owned)| (0..*owned as usize).map(move |slot| page * page_size + slot))
                };
                each("k_pages", k_pages, &mut rows())?;
                each("v_pages", v_pages, &mut rows())
            }
        }
    }

    fn validate_finite(&self) -> Result<(), CaseError> {
        check_finite("q", &self.q, &mut (0..self.q.shape().first().copied().unwrap_or(0)))?;
        self.for_kv(check_finite)
    }

    /// Whether all scores stay in range, be the scale applied to `q` beforehand or to `q . k` afterwards.
    ///
    /// The kernels mask structurally and so may compute the score of a key that a row does not see: all keys of a
    /// row's sequence are checked.
    fn validate_range(&self) -> Result<(), CaseError> {
        let (q_heads, head_dim) = (self.geometry.q_heads() as usize, self.geometry.head_dim() as usize);
        let group = self.geometry.group() as usize;
        let (scale, factor) = (self.options.scale.abs(), self.query_factor());
        let capped = |score: f64| score.min(self.options.softcap.unwrap_or(f64::INFINITY));
        let dot_max = f64::from(f32::MAX) / ROUNDING_ROOM;
        let bias_max = self.extras.bias.iter().flat_map(bias_heads).flatten().fold(0.0, |max, x| {
            let size = f64::from(x.abs());
            if size.is_finite() { f64::max(max, size) } else { max }
        });
        let q = self.q.to_f32();
        let mut rows = q.chunks_exact(head_dim * q_heads).enumerate();
        for (seq, (q_len, kv_len)) in self.lengths().into_iter().enumerate() {
            if q_len == 0 {
                continue;
            }
            let Some(kv) = (kv_len > 0).then(|| self.sequence_kv(seq)).flatten() else {
                // No score is computed, but the row is still scaled.
                for (row, q) in rows.by_ref().take(q_len as usize) {
                    check_scaled_query(factor, row, q, head_dim)?;
                }
                continue;
            };
            let key_norm_max: Vec<f64> = (0..self.geometry.kv_heads() as usize)
                .map(|head| kv.k(head).chunks_exact(head_dim).map(norm).fold(0.0, f64::max))
                .collect();
            // No row is farther from a key than this.
            let distance_max = f64::from(q_len) + f64::from(kv_len);
            for (i, (row, q)) in (0_u32..q_len).zip(rows.by_ref()) {
                check_scaled_query(factor, row, q, head_dim)?;
                for (head, q) in q.chunks_exact(head_dim).enumerate() {
                    let slope = self.extras.alibi_slopes.as_ref().and_then(|slopes| slopes.get(head));
                    let slope = slope.map_or(0.0, |slope| f64::from(slope.abs()));
                    // Cauchy-Schwarz: sum |q_i k_i| <= |q| |k|. Nearly every row passes here.
                    let dot = norm(q) * key_norm_max.get(head / group).copied().unwrap_or(0.0);
                    let added = slope * distance_max + bias_max;
                    if dot <= dot_max && factor * dot <= SCORE_MAX && capped(scale * dot) + added <= SCORE_MAX {
                        continue;
                    }
                    let bias = self.bias_row(seq, i, head);
                    for (key, k) in kv.k(head / group).chunks_exact(head_dim).enumerate() {
                        let dot: f64 = q.iter().zip(k).map(|(q, k)| (f64::from(*q) * f64::from(*k)).abs()).sum();
                        if dot > dot_max {
                            return Err(CaseError::DotRange { row, head, key, found: dot, limit: dot_max });
                        }
                        let position = f64::from(kv_len) - f64::from(q_len) + f64::from(i);
                        let bias = bias.as_ref().and_then(|bias| bias.get(key)).map_or(0.0, |x| f64::from(x.abs()));
                        // A bias of -inf hides the key.
                        let added = slope * (key as f64 - position).abs() + if bias.is_finite() { bias } else { 0.0 };
                        for found in [factor * dot, capped(scale * dot) + added] {
                            if found > SCORE_MAX {
                                return Err(CaseError::ScoreRange { row, head, key, found, limit: SCORE_MAX });
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// The values of each head of a bias.
fn bias_heads(bias: &Tensor) -> impl Iterator<Item = Vec<f32>> {
    let [heads, entries] = match *bias.shape() {
        [heads, entries] => [heads, entries],
        _ => [0, 0],
    };
    (0..heads).map(move |head| {
        let mut values = Vec::with_capacity(entries);
        // The shape is as read, so that the head is there.
        let _ = bias.extend_f32(head * entries, entries, &mut values);
        values
    })
}

/// How many slots of each page some sequence owns; a page's owned slots are its first ones. Takes a step per entry of
/// the table, however many tokens a page has.
fn owned_slots(
    pool_shape: &[usize],
    page_size: usize,
    (page_indptr, page_ids, kv_len): (&[u32], &[u32], &[u32]),
) -> Vec<u32> {
    let mut owned = vec![0; pool_shape.first().copied().unwrap_or(0)];
    for (first, kv_len) in page_indptr.iter().zip(kv_len) {
        let pages = page_ids.get(*first as usize..).unwrap_or_default();
        for (page, before) in pages.iter().zip((0..*kv_len).step_by(page_size.max(1))) {
            if let Some(owned) = owned.get_mut(*page as usize) {
                *owned = (kv_len - before).min(page_size as u32).max(*owned);
            }
        }
    }
    owned
}

fn norm(row: &[f32]) -> f64 {
    row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt()
}

/// `q`, one row of all heads, must stay finite where a kernel scales it first.
fn check_scaled_query(factor: f64, row: usize, q: &[f32], head_dim: usize) -> Result<(), CaseError> {
    let limit = f64::from(f32::MAX) / LOG2_E / ROUNDING_ROOM;
    for (head, q) in q.chunks_exact(head_dim).enumerate() {
        let found = q.iter().fold(0.0, |max: f32, x| max.max(x.abs()));
        if factor * f64::from(found) > limit {
            return Err(CaseError::ScaledQueryRange { row, head, found: factor * f64::from(found), limit });
        }
    }
    Ok(())
}

fn check_finite(
    tensor: &'static str,
    elements: &Tensor,
    rows: &mut dyn Iterator<Item = usize>,
) -> Result<(), CaseError> {
    match find(elements, rows, |x| !x.is_finite()) {
        Some((index, value)) => Err(CaseError::NotFinite { tensor, index, value }),
        None => Ok(()),
    }
}

/// The first element of some rows of a tensor for which `bad` holds, with its index. A row is everything under the first
/// axis or, for four axes, the first two.
fn find(
    tensor: &Tensor,
    rows: &mut dyn Iterator<Item = usize>,
    bad: impl Fn(f32) -> bool,
) -> Option<(Vec<usize>, f32)> {
    let shape = tensor.shape();
    let width: usize = shape.iter().skip(shape.len().saturating_sub(2)).product();
    let mut values = Vec::with_capacity(width);
    for row in rows {
        values.clear();
        // The shapes have been checked, so that the row is there.
        let _ = tensor.extend_f32(row * width, width, &mut values);
        if let Some((at, value)) = values.iter().copied().enumerate().find(|(_, x)| bad(*x)) {
            let mut index = vec![0; shape.len()];
            let mut rest = row * width + at;
            for (index, dim) in index.iter_mut().zip(shape).rev() {
                (*index, rest) = (rest % dim, rest / dim);
            }
            return Some((index, value));
        }
    }
    None
}
