//! Parts of a plan's work that may be submitted by themselves.

use std::ops::Range;

use super::device::blocks_of;
use super::work::{Item, WorkLists};
use super::{ITEM_WORDS, Params, Plan, PlanCapacity, RECORD_WORDS};
use crate::kernels::KernelId;

/// Workgroups of one kernel that lie one after the other in a plan: a dispatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The kernel.
    pub kernel: KernelId,
    /// Which of its workgroups.
    pub workgroups: Range<u32>,
}

/// All workgroups of a kernel in a round that read pages of one group of segments; of a merge, which reads none, all of the
/// round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    kernel: KernelId,
    workgroups: Range<u32>,
    round: u32,
    group: u32,
}

impl Span {
    /// The whole span as one slice, and its group.
    pub fn slice(&self) -> (Slice, u32) {
        (Slice { kernel: self.kernel, workgroups: self.workgroups.clone() }, self.group)
    }
}

/// The spans of items that lie round by round and group by group, in the order in which they must reach the device: a round's
/// merges come before the next round, whose partial states take the place of its own.
pub(super) fn spans(lists: &WorkLists, kv_heads: u32) -> Vec<Span> {
    let of = |kernel, items: &[Item]| -> Vec<Span> {
        let mut begin = 0;
        let span = |items: &[Item]| {
            // Counted in 32 bits before.
            let end = begin + items.len() as u32 * kv_heads;
            let (round, group) = items.first().map_or((0, 0), Item::span);
            let span = Span { kernel, workgroups: begin..end, round, group };
            begin = end;
            span
        };
        items.chunk_by(|a, b| a.span() == b.span()).map(span).collect()
    };
    let kernels =
        [(KernelId::Prefill, &lists.prefill), (KernelId::Decode, &lists.decode), (KernelId::Merge, &lists.merge)];
    let mut spans: Vec<Span> = kernels.into_iter().flat_map(|(kernel, items)| of(kernel, items)).collect();
    spans.sort_by_key(|span| span.round);
    spans
}

/// A slice as it is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dispatch {
    pub kernel: KernelId,
    pub groups: u32,
    /// Its block of parameters.
    pub block: u32,
    /// The group of segments that it reads pages of.
    pub segment_group: u32,
}

impl Plan {
    /// The slices of the work, in the order in which they must reach the device: what is merged comes before the merges.
    /// One for each kernel that has work, for each group of segments that it reads pages of ([`KvLayout`]) and each round of
    /// sequences whose partial states fit into a workspace together, until [`Plan::cut`] is called.
    ///
    /// [`KvLayout`]: crate::KvLayout
    pub fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// Cuts the work of each kernel into slices of up to `work_max` multiply-adds ([`Plan::work`]), or of a single
    /// workgroup where that is more. Workgroups do not know of each other, so no cut changes a bit.
    ///
    /// A workgroup itself is bounded: its rows go through at most as many keys as a split has (32,768 in the prefill
    /// variants of the rule, 256 in decodes), and a merge through one state per split and shared prefix.
    pub fn cut(&mut self, work_max: impl Fn(KernelId) -> u64) {
        let cut = |span: &Span| {
            let (kernel, Range { start, end }) = (span.kernel, span.workgroups.clone());
            let (work_max, mut slices) = (work_max(kernel), Vec::new());
            let (mut begin, mut work) = (start, 0_u64);
            for group in start..end {
                let more = self.group_work(kernel, group);
                if group > begin && work.saturating_add(more) > work_max {
                    slices.push(Slice { kernel, workgroups: begin..group });
                    (begin, work) = (group, 0);
                }
                work = work.saturating_add(more);
            }
            slices.push(Slice { kernel, workgroups: begin..end });
            slices.into_iter().map(|slice| (slice, span.group)).collect::<Vec<_>>()
        };
        (self.slices, self.segment_groups) = self.spans.iter().flat_map(cut).unzip();
    }

    /// Multiply-adds of a slice, about: keys, times rows of a tile (whether there are so many or not), times dimensions of
    /// keys and values; of a merge, states take the place of keys.
    pub fn work(&self, slice: &Slice) -> u64 {
        slice.workgroups.clone().fold(0, |sum: u64, group| sum.saturating_add(self.group_work(slice.kernel, group)))
    }

    fn group_work(&self, kernel: KernelId, group: u32) -> u64 {
        let (params, tiles) = (&self.params, &self.tiles);
        let [qk_dims, v_dims] = [tiles.qk_chunks, tiles.v_chunks].map(|chunks| u64::from(8 * chunks));
        let (items, rows, dims) = match kernel {
            KernelId::Prefill => (params.prefill_items, tiles.prefill_rows(), qk_dims + v_dims),
            KernelId::Decode => (params.decode_items, tiles.decode_rows, qk_dims + v_dims),
            KernelId::Merge => (params.merge_items, tiles.merge_rows, v_dims),
            KernelId::Append => return 0,
        };
        let word = |index: usize| self.words.get(index).copied().unwrap_or(0);
        let item_words = ITEM_WORDS + if self.extras.mask { 2 } else { 0 };
        let item = items as usize + (group / params.kv_heads.max(1)) as usize * item_words;
        let [record, _, begin, end] = [0, 1, 2, 3].map(|at| word(item + at));
        let splits = |record: u32| u64::from(word(record as usize * RECORD_WORDS + 5));
        let keys = match kernel {
            KernelId::Merge if self.names_sources() => (begin..end).map(|source| splits(word(source as usize))).sum(),
            KernelId::Merge => splits(record),
            _ => u64::from(end - begin),
        };
        // Nothing is free.
        keys.max(1).saturating_mul(u64::from(rows) * dims)
    }

    /// What it needs on the device.
    pub fn capacity(&self) -> PlanCapacity {
        PlanCapacity {
            words: self.words.len() as u64,
            blocks: 1 + self.parts().count() as u32,
            total_q: self.total_q,
            score_pairs: self.score_pairs,
            workspace_bytes: self.workspace_bytes,
        }
    }

    /// Whether merges name what they fold.
    pub(super) fn names_sources(&self) -> bool {
        self.extras.shared_prefixes || self.groups.count() > 1
    }

    /// Slices, each with the group of segments that it reads pages of.
    fn grouped(&self) -> impl Iterator<Item = (&Slice, u32)> {
        self.slices.iter().zip(self.segment_groups.iter().copied())
    }

    /// Slices with parameters of their own: those that are not all of a kernel's work, and those that read pages of one group
    /// of several.
    fn parts(&self) -> impl Iterator<Item = (&Slice, u32)> {
        self.grouped().filter(|(slice, _)| !self.is_whole(slice))
    }

    fn is_whole(&self, slice: &Slice) -> bool {
        let all = self
            .workgroups()
            .into_iter()
            .any(|(kernel, groups)| kernel == slice.kernel && slice.workgroups == (0..groups));
        all && (self.groups.count() == 1 || slice.kernel == KernelId::Merge)
    }

    /// The parameters, then those of each part.
    pub(crate) fn blocks(&self) -> Vec<u8> {
        let of_part = |(slice, group): (&Slice, u32)| {
            let params = Params { first_group: slice.workgroups.start, ..self.params };
            let mut params = params.for_group(&self.groups, group);
            let groups = match slice.kernel {
                KernelId::Prefill => &mut params.prefill_groups,
                KernelId::Decode => &mut params.decode_groups,
                _ => &mut params.merge_groups,
            };
            *groups = slice.workgroups.len() as u32;
            params
        };
        blocks_of(std::iter::once(self.params).chain(self.parts().map(of_part)))
    }

    /// What is recorded.
    pub(crate) fn dispatches(&self) -> Vec<Dispatch> {
        let mut parts = 0;
        let dispatch = |(slice, segment_group): (&Slice, u32)| {
            let is_part = !self.is_whole(slice);
            parts += u32::from(is_part);
            Dispatch {
                kernel: slice.kernel,
                groups: slice.workgroups.len() as u32,
                block: if is_part { parts } else { 0 },
                segment_group,
            }
        };
        self.grouped().map(dispatch).collect()
    }
}
