//! Parts of a plan's work that may be submitted by themselves.

use std::ops::Range;

use super::device::blocks_of;
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

/// A slice as it is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dispatch {
    pub kernel: KernelId,
    pub groups: u32,
    /// Its block of parameters.
    pub block: u32,
}

impl Plan {
    /// The slices of the work, in the order in which they must reach the device: what is merged comes before the merges.
    /// One for each kernel that has work, until [`Plan::cut`] is called.
    pub fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// Cuts the work of each kernel into slices of up to `work_max` multiply-adds ([`Plan::work`]), or of a single
    /// workgroup where that is more. Workgroups do not know of each other, so no cut changes a bit.
    ///
    /// A workgroup itself is bounded: its rows go through at most as many keys as a split has (32,768 in the prefill
    /// variants of the rule, 256 in decodes), and a merge through one state per split and shared prefix.
    pub fn cut(&mut self, work_max: impl Fn(KernelId) -> u64) {
        let cut = |(kernel, groups)| {
            let (work_max, mut slices) = (work_max(kernel), Vec::new());
            let (mut begin, mut work) = (0, 0_u64);
            for group in 0..groups {
                let more = self.group_work(kernel, group);
                if group > begin && work.saturating_add(more) > work_max {
                    slices.push(Slice { kernel, workgroups: begin..group });
                    (begin, work) = (group, 0);
                }
                work = work.saturating_add(more);
            }
            slices.push(Slice { kernel, workgroups: begin..groups });
            slices
        };
        self.slices = with_work(&self.params).flat_map(cut).collect();
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
            KernelId::Merge if self.extras.shared_prefixes => {
                (begin..end).map(|source| splits(word(source as usize))).sum()
            }
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

    /// Slices that are not all of a kernel's work.
    fn parts(&self) -> impl Iterator<Item = &Slice> {
        self.slices.iter().filter(|slice| !self.is_whole(slice))
    }

    fn is_whole(&self, slice: &Slice) -> bool {
        with_work(&self.params).any(|(kernel, groups)| kernel == slice.kernel && slice.workgroups == (0..groups))
    }

    /// The parameters, then those of each part.
    pub(crate) fn blocks(&self) -> Vec<u8> {
        let of_part = |slice: &Slice| {
            let mut params = Params { first_group: slice.workgroups.start, ..self.params };
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
        let dispatch = |slice: &Slice| {
            let is_part = !self.is_whole(slice);
            parts += u32::from(is_part);
            Dispatch {
                kernel: slice.kernel,
                groups: slice.workgroups.len() as u32,
                block: if is_part { parts } else { 0 },
            }
        };
        self.slices.iter().map(dispatch).collect()
    }
}

/// The kernels that have work, and how many workgroups.
fn with_work(params: &Params) -> impl Iterator<Item = (KernelId, u32)> + use<> {
    let Params { prefill_groups, decode_groups, merge_groups, .. } = *params;
    [(KernelId::Prefill, prefill_groups), (KernelId::Decode, decode_groups), (KernelId::Merge, merge_groups)]
        .into_iter()
        .filter(|(_, groups)| *groups > 0)
}

/// One slice for each kernel.
pub(super) fn whole(params: &Params) -> Vec<Slice> {
    with_work(params).map(|(kernel, groups)| Slice { kernel, workgroups: 0..groups }).collect()
}
