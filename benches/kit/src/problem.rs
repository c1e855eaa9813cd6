//! What is measured: a case of the case table, and its work by count.

use paged_attention::{Case, Chains, Dtype, KvSource, ROW_ALIGN, Tensor};
use paged_attention_cases::{CaseSpec, Heads, build};

use crate::error::BenchError;

/// A case in packed rows, with the description that it was made from.
#[derive(Clone, Debug)]
pub struct Problem {
    spec: CaseSpec,
    case: Case,
}

/// Keys and values in packed rows.
pub struct Packed<'a> {
    /// `[total_kv, kv_heads, head_dim]`.
    pub k: &'a Tensor,
    /// `[total_kv, kv_heads, v_head_dim]`.
    pub v: &'a Tensor,
    /// `[seqs + 1]`.
    pub kv_indptr: &'a [u32],
}

impl Problem {
    /// Makes the tensors. Which pages they are written into is the contenders' affair.
    ///
    /// # Errors
    /// [`BenchError::Shape`] for heads, dimensions and sizes that the kernels or the baseline do not take.
    pub fn new(spec: CaseSpec) -> Result<Self, BenchError> {
        let pool = *spec.kv_input.pool();
        let spec = spec.contiguous(pool);
        let refuse = |why: String| BenchError::Shape { name: spec.name.clone(), why };
        let Heads { q_heads, kv_heads, head_dim, v_head_dim } = spec.heads;
        for dim in [head_dim, v_head_dim] {
            if !dim.is_multiple_of(ROW_ALIGN) {
                return Err(refuse(format!("head dimension {dim}; a multiple of {ROW_ALIGN} is needed")));
            }
        }
        let elements = |heads: u32, count: fn(&(u32, u32)) -> u32| {
            let rows: u64 = lengths(&spec).map(|lengths| u64::from(count(&lengths))).sum();
            rows.saturating_mul(u64::from(heads) * u64::from(head_dim.max(v_head_dim)))
        };
        if elements(q_heads, |lengths| lengths.0).max(elements(kv_heads, |lengths| lengths.1)) > u64::from(u32::MAX) {
            return Err(refuse("a tensor has more elements than 32 bits count".to_owned()));
        }
        let case = build(&spec).map_err(|error| refuse(error.to_string()))?;
        Ok(Self { spec, case })
    }

    /// What it is called in reports.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The description.
    pub fn spec(&self) -> &CaseSpec {
        &self.spec
    }

    /// The tensors, in packed rows.
    pub fn case(&self) -> &Case {
        &self.case
    }

    /// Type of keys and values; outputs are f32.
    pub fn dtype(&self) -> Dtype {
        self.spec.kv
    }

    /// Its keys and values.
    ///
    /// # Errors
    /// None: a problem is never in pages.
    pub fn packed(&self) -> Result<Packed<'_>, BenchError> {
        match self.case.kv() {
            KvSource::Contiguous { k, v, kv_indptr } => Ok(Packed { k, v, kv_indptr }),
            KvSource::Paged { .. } => Err(BenchError::Shape {
                name: self.spec.name.clone(),
                why: "keys and values lie in pages; packed rows are needed".to_owned(),
            }),
        }
    }

    /// Whether every sequence has one query row: the limit is then reading, not arithmetic.
    pub fn decodes(&self) -> bool {
        lengths(&self.spec).all(is_decode)
    }

    /// The sequences with one query row and the others, each as a problem of its own; the problem itself where it has
    /// only one of the two. Values are those of the whole.
    ///
    /// # Errors
    /// As [`Problem::new`].
    pub fn groups(&self) -> Result<Vec<Self>, BenchError> {
        let (decodes, others): (Vec<_>, Vec<_>) =
            self.spec.seqs.iter().copied().partition(|seq| is_decode((seq.q_len, seq.kv_len)));
        if decodes.is_empty() || others.is_empty() {
            return Ok(vec![self.clone()]);
        }
        [("decodes", decodes), ("prompts", others)]
            .into_iter()
            .map(|(what, seqs)| Self::new(self.spec.clone().named(format!("{}, {what}", self.spec.name)).seqs(seqs)))
            .collect()
    }

    /// Words of the output `[total_q, q_heads, v_head_dim]` per query row.
    fn out_row(&self) -> usize {
        self.spec.heads.q_heads as usize * self.spec.heads.v_head_dim as usize
    }

    /// The output in a buffer that may be longer.
    pub(crate) fn rows_of(&self, mut out: Vec<u32>) -> Vec<u32> {
        out.truncate(lengths(&self.spec).map(|(q_len, _)| q_len as usize).sum::<usize>() * self.out_row());
        out
    }

    /// The rows of this problem's output in the order of [`Problem::groups`].
    pub(crate) fn in_groups(&self, out: &[u32]) -> Vec<u32> {
        let [mut decodes, mut others] = [Vec::new(), Vec::new()];
        let mut rest = out;
        for length in lengths(&self.spec) {
            let (rows, after) = rest.split_at_checked(length.0 as usize * self.out_row()).unwrap_or((rest, &[]));
            if is_decode(length) { &mut decodes } else { &mut others }.extend(rows);
            rest = after;
        }
        [decodes, others].concat()
    }

    /// Floating-point operations that attention needs: two per multiply-add of every visible pair, softmax not counted.
    pub fn flop(&self) -> f64 {
        lengths(&self.spec).map(|length| self.flop_of(length)).sum()
    }

    fn flop_of(&self, (q_len, kv_len): (u32, u32)) -> f64 {
        let options = self.case.options();
        let pairs: u64 = (0..q_len).map(|row| options.visible(q_len, kv_len, row).len() as u64).sum();
        let Heads { q_heads, head_dim, v_head_dim, .. } = self.spec.heads;
        2.0 * pairs as f64 * f64::from(q_heads) * f64::from(head_dim + v_head_dim)
    }

    /// Bytes of K and V, each counted once.
    pub fn kv_bytes(&self) -> f64 {
        lengths(&self.spec).map(|length| self.kv_bytes_of(length)).sum()
    }

    fn kv_bytes_of(&self, (_, kv_len): (u32, u32)) -> f64 {
        let Heads { kv_heads, head_dim, v_head_dim, .. } = self.spec.heads;
        f64::from(self.dtype().bytes() * kv_heads) * f64::from(kv_len) * f64::from(head_dim + v_head_dim)
    }

    /// The least time that a device can take which does `gflops` 10^9 operations and reads `gbps` 10^9 bytes in a second:
    /// a sequence with one query row reads its keys and values, another one multiplies and adds.
    pub fn limit_s(&self, gflops: f64, gbps: f64) -> f64 {
        let seconds = |length| match is_decode(length) {
            true => self.kv_bytes_of(length) / gbps,
            false => self.flop_of(length) / gflops,
        };
        1e-9 * lengths(&self.spec).map(seconds).sum::<f64>()
    }

    /// Chains that a kernel of others does not exceed: an online softmax key by key, whose sums are made in one chain.
    pub fn longest_chains(&self) -> Vec<Chains> {
        let chains = |(_, kv_len): (u32, u32)| Chains {
            dot: self.spec.heads.head_dim + 1,
            step_keys: 1,
            accumulate: kv_len.saturating_mul(2).saturating_add(2),
            scaled: false,
            order: Vec::new(),
        };
        lengths(&self.spec).map(chains).collect()
    }
}

fn lengths(spec: &CaseSpec) -> impl Iterator<Item = (u32, u32)> {
    spec.seqs.iter().map(|seq| (seq.q_len, seq.kv_len))
}

fn is_decode((q_len, _): (u32, u32)) -> bool {
    q_len == 1
}

#[cfg(test)]
mod tests {
    use paged_attention_cases::{speed, timed};

    use super::*;

    fn named(name: &str) -> Problem {
        Problem::new(speed().into_iter().find(|spec| spec.name == name).unwrap()).unwrap()
    }

    #[test]
    fn counts_of_the_named_shapes() {
        let p1 = named("P1");
        // Every row sees itself: N (N + 1) / 2 pairs.
        assert_eq!(p1.flop(), 4.0 * 8.0 * 64.0 * (1024.0 * 1025.0 / 2.0));
        assert_eq!(p1.kv_bytes(), 4.0 * 2.0 * 8.0 * 64.0 * 1024.0);
        assert!(!p1.decodes());
        let d2 = Problem::new(named("D2").spec.dtype(Dtype::F16)).unwrap();
        assert_eq!(d2.kv_bytes(), 2.0 * 2.0 * 3.0 * 64.0 * 8.0 * 1024.0);
        assert_eq!(d2.flop(), 4.0 * 9.0 * 64.0 * 8.0 * 1024.0);
        assert!(d2.decodes());
        assert_eq!(d2.limit_s(f64::NAN, 2.0), 1e-9 * d2.kv_bytes() / 2.0);
        assert_eq!(p1.limit_s(2.0, f64::NAN), 1e-9 * p1.flop() / 2.0);
    }

    #[test]
    fn unusable_shapes() {
        for (q_heads, kv_heads, dim) in [(3, 2, 64), (0, 0, 64), (4, 2, 0), (4, 2, 60), (4, 2, 1 << 20)] {
            let spec = timed("x", Heads::new(q_heads, kv_heads, dim), vec![(1, 1)]);
            assert!(Problem::new(spec).is_err(), "{q_heads} {kv_heads} {dim}");
        }
        let spec = timed("x", Heads::new(64, 64, 128), vec![(1, 1 << 20)]);
        assert!(matches!(Problem::new(spec), Err(BenchError::Shape { .. })));
    }

    /// Groups have the whole's values, and together its work and its rows.
    #[test]
    fn groups_of_a_mixed_batch() {
        let whole =
            Problem::new(timed("x", Heads::new(2, 1, 8), vec![(3, 4), (1, 5), (0, 2), (1, 1), (2, 2)])).unwrap();
        let groups = whole.groups().unwrap();
        let [decodes, prompts] = &groups[..] else { panic!("{} groups", groups.len()) };
        assert_eq!(
            (decodes.case.lengths(), prompts.case.lengths()),
            (vec![(1, 5), (1, 1)], vec![(3, 4), (0, 2), (2, 2)])
        );
        assert!(decodes.decodes() && !prompts.decodes());
        assert_eq!(whole.flop(), decodes.flop() + prompts.flop());
        // Queries stand for outputs, which have the same size here.
        let words = |problem: &Problem| -> Vec<u32> { bytemuck::pod_collect_to_vec(problem.case.q().bytes()) };
        assert_eq!(whole.in_groups(&words(&whole)), [words(decodes), words(prompts)].concat());
        assert_eq!(prompts.rows_of(words(&whole)).len(), words(prompts).len());
        assert_eq!(decodes.groups().unwrap().len(), 1);
    }
}
