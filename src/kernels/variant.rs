//! Variants of the kernels, and the rule that chooses among them.

use super::BuildError;
use crate::adapter;
use crate::geometry::{HeadGeometry, padded_dim};

/// Subgroup sizes that there are variants for.
pub const SUBGROUP_SIZES: [u32; 5] = [4, 8, 16, 32, 64];

/// As `split_keys`: no sequence is so long that its keys are split. No rule chooses it.
pub(super) const UNSPLIT: u32 = 1 << 31;

/// Keys per split of a prefill. A work item is as long as this at most, so that no dispatch has to be longer (drivers end
/// what takes seconds); prompts have rows enough to fill a GPU, so shorter splits would only be more to merge. llvmpipe of
/// Mesa 22 ends all loops of an invocation after 65,535 iterations.
const PREFILL_SPLIT_KEYS: u32 = 1 << 15;

/// In which order work items of unequal size are dispatched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ItemOrder {
    /// Large ones first: workgroups are taken one by one, and small ones fill the gaps at the end.
    LargeFirst,
    /// Large and small in turn: each thread is given one stretch of the grid, as llvmpipe does.
    Alternating,
}

/// How the prefill kernel is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrefillVariant {
    /// 0: all lanes read the same address. Otherwise the subgroup size: each lane reads other words, and the subgroup
    /// broadcasts them.
    pub subgroup: u32,
    /// Lanes of a workgroup; a multiple of `subgroup`.
    pub lanes: u32,
    /// Tile rows that each lane owns.
    pub rows_per_lane: u32,
    /// Keys per online-softmax step.
    pub step_keys: u32,
    /// Keys per split, a multiple of `step_keys`; longer sequences leave partial states.
    pub split_keys: u32,
    /// Order of the work items.
    pub order: ItemOrder,
}

/// How the decode kernel is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecodeVariant {
    /// Without subgroups: a lane per key, queries in workgroup memory.
    Workgroup,
    /// A lane per key, each walking through keys that lie one after the other; queries broadcast in the subgroup.
    Streams {
        /// The subgroup's size, and the workgroup's.
        subgroup: u32,
    },
    /// Several lanes per key, each with some of its dimensions; sums by exchange in the subgroup.
    Exchange {
        /// The subgroup's size, and the workgroup's.
        subgroup: u32,
    },
}

impl PrefillVariant {
    /// What is wrong with the sizes.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        let Self { subgroup, lanes, rows_per_lane, step_keys, split_keys, .. } = *self;
        if subgroup != 0 && !SUBGROUP_SIZES.contains(&subgroup) {
            Err("a subgroup size of 4, 8, 16, 32 or 64, or none (0)")
        } else if lanes == 0 || !lanes.is_multiple_of(subgroup.max(1)) {
            Err("a number of lanes from 1 that is a multiple of the subgroup size")
        } else if !(1..=16).contains(&rows_per_lane) || ![1, 2, 4, 8, 16].contains(&step_keys) {
            // Stretches that a mask leaves begin at multiples of 32 keys, and so at a step.
            Err("1 to 16 rows per lane, and a power of two up to 16 for the keys per step")
        } else if split_keys == 0 || !split_keys.is_multiple_of(step_keys) {
            Err("a number of keys per split that is a multiple of the keys per step")
        } else {
            Ok(())
        }
    }
}

impl DecodeVariant {
    /// What is wrong with the sizes.
    pub(super) fn check(self) -> Result<(), &'static str> {
        match self {
            Self::Workgroup => Ok(()),
            Self::Streams { subgroup } | Self::Exchange { subgroup } if SUBGROUP_SIZES.contains(&subgroup) => Ok(()),
            Self::Streams { .. } | Self::Exchange { .. } => Err("a subgroup size of 4, 8, 16, 32 or 64"),
        }
    }

    /// The subgroup size, 0 without.
    pub fn subgroup(self) -> u32 {
        match self {
            Self::Workgroup => 0,
            Self::Streams { subgroup } | Self::Exchange { subgroup } => subgroup,
        }
    }
}

/// One choice for every kernel that has variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variants {
    /// The prefill kernel's.
    pub prefill: PrefillVariant,
    /// The decode kernel's.
    pub decode: DecodeVariant,
}

/// What an adapter and a device say of themselves, as far as the rule asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterFacts {
    /// Whether shaders run on the CPU: loads cost as much as arithmetic, and registers spill to a cache that is near.
    pub cpu: bool,
    /// Whether the driver's compiler takes minutes over long kernels: software OpenGL.
    pub slow_compiler: bool,
    /// Whether the driver is llvmpipe of Mesa 22 or before, whose code keeps fewer rows in registers.
    pub old_llvmpipe: bool,
    /// Smallest and largest subgroup size; `None` where the device has no subgroups enabled.
    pub subgroup_sizes: Option<(u32, u32)>,
}

impl AdapterFacts {
    /// A GPU of which nothing more is known.
    pub const PLAIN_GPU: Self = Self { cpu: false, slow_compiler: false, old_llvmpipe: false, subgroup_sizes: None };

    /// A software driver of which nothing more is known.
    pub const PLAIN_CPU: Self = Self { cpu: true, ..Self::PLAIN_GPU };

    /// The same with subgroups of one size.
    #[must_use]
    pub const fn with_subgroups(self, size: u32) -> Self {
        Self { subgroup_sizes: Some((size, size)), ..self }
    }

    /// Reads the facts. `device` may have fewer features than its adapter.
    pub fn new(adapter: &wgpu::AdapterInfo, device: &wgpu::Device) -> Self {
        let subgroups = device.features().contains(wgpu::Features::SUBGROUP);
        let cpu = adapter::kind(adapter) == adapter::Kind::Software;
        Self {
            cpu,
            slow_compiler: cpu && adapter.backend == wgpu::Backend::Gl,
            old_llvmpipe: cpu && mesa_major(&adapter.driver_info).is_some_and(|major| major <= 22),
            subgroup_sizes: subgroups.then_some((adapter.subgroup_min_size, adapter.subgroup_max_size)),
        }
    }
}

/// The first number of a driver's version, as in "Mesa 22.3.6 (LLVM 15.0.6)".
fn mesa_major(driver_info: &str) -> Option<u32> {
    let (_, version) = driver_info.split_once("Mesa ")?;
    version.split('.').next()?.parse().ok()
}

impl Variants {
    /// The variants to try on a device, best first; the last needs no subgroups. The rule, with what it rests on, is
    /// in the documentation's page on performance.
    ///
    /// Where an adapter has several subgroup sizes, its drivers choose one per pipeline: every size is a candidate,
    /// and a kernel whose subgroups turn out to have another size says so in its status.
    pub fn candidates(facts: &AdapterFacts, geometry: &HeadGeometry) -> Vec<Self> {
        let (min, max) = facts.subgroup_sizes.unwrap_or((0, 0));
        let mut sizes: Vec<u32> = SUBGROUP_SIZES.into_iter().filter(|size| (min..=max).contains(size)).collect();
        // 32 is the most common where there is a choice.
        sizes.sort_by_key(|size| size.abs_diff(32));
        let mut candidates: Vec<Self> =
            sizes.into_iter().map(|size| Self::with_subgroups(facts, geometry, size)).collect();
        candidates.push(Self::base(facts, geometry));
        candidates
    }

    /// Every choice that the rule may come to for a geometry, on whatever device: what translation lanes look at.
    pub fn all(geometry: &HeadGeometry) -> Vec<Self> {
        let old = AdapterFacts { old_llvmpipe: true, ..AdapterFacts::PLAIN_CPU };
        let plain = [AdapterFacts::PLAIN_GPU, AdapterFacts::PLAIN_CPU, old];
        let sized =
            SUBGROUP_SIZES.iter().flat_map(|size| plain.map(|facts| Self::with_subgroups(&facts, geometry, *size)));
        plain.iter().map(|facts| Self::base(facts, geometry)).chain(sized).collect()
    }

    /// Checks sizes that a caller has chosen.
    pub(super) fn validate(&self) -> Result<(), BuildError> {
        let checked = self.prefill.check().and_then(|()| self.decode.check());
        checked.map_err(|needed| BuildError::Variants { variants: Box::new(*self), needed })
    }

    /// The variants that need no device feature.
    pub fn base(facts: &AdapterFacts, geometry: &HeadGeometry) -> Self {
        Self { prefill: prefill(facts, geometry, 0), decode: DecodeVariant::Workgroup }
    }

    /// The variants to take where compile time counts for more than speed: a prefill of one row per lane and two keys per
    /// step, and a decode whose lanes hold little of a query.
    pub fn quick(facts: &AdapterFacts, geometry: &HeadGeometry) -> Self {
        let rule = Self::candidates(facts, geometry);
        let Self { prefill, decode } = rule.first().copied().unwrap_or(Self::base(facts, geometry));
        let decode = match decode {
            DecodeVariant::Workgroup => DecodeVariant::Workgroup,
            DecodeVariant::Streams { subgroup } | DecodeVariant::Exchange { subgroup } => {
                DecodeVariant::Exchange { subgroup }
            }
        };
        Self { prefill: PrefillVariant { rows_per_lane: 1, step_keys: 2, ..prefill }, decode }
    }

    /// The same for calls whose sequences share prefixes. On a CPU a lane then owns twice the rows, and a step takes 4 keys:
    /// 16 requests of 4 query heads each are one tile at dimension 128, so that a prefix is read once (measured with
    /// `cargo bench --bench shared`: 1.1 times as fast). Rows per lane on a GPU are bound by registers, and its tiles have 64
    /// rows or more anyway.
    pub(super) fn sharing(self, facts: &AdapterFacts) -> Self {
        if !facts.cpu || facts.slow_compiler {
            return self;
        }
        Self {
            prefill: PrefillVariant { rows_per_lane: 2 * self.prefill.rows_per_lane, step_keys: 4, ..self.prefill },
            ..self
        }
    }

    fn with_subgroups(facts: &AdapterFacts, geometry: &HeadGeometry, subgroup: u32) -> Self {
        let decode = if facts.cpu { DecodeVariant::Streams { subgroup } } else { DecodeVariant::Exchange { subgroup } };
        Self { prefill: prefill(facts, geometry, subgroup), decode }
    }
}

/// A row takes a query and an accumulator in registers: 128 words at head dimension 64. A GPU's lane has 255 registers at
/// most, so two rows fit only below that. On a CPU what counts is that a load serves many rows; short steps keep the
/// compiler's work small.
fn prefill(facts: &AdapterFacts, geometry: &HeadGeometry, subgroup: u32) -> PrefillVariant {
    let row_words = padded_dim(geometry.head_dim()) + padded_dim(geometry.v_head_dim());
    if facts.cpu {
        let rows_per_lane = match (row_words, subgroup) {
            _ if facts.slow_compiler => 1,
            (..=256, 0) => 4,
            // Four short rows take a fifth more time than three there, and a third less elsewhere.
            (..=128, 1..) if facts.old_llvmpipe => 3,
            (..=256, 1..) => 4,
            (..=512, _) => 2,
            _ => 1,
        };
        // One subgroup, or two small ones: there is no occupancy to gain, and few rows are idle at a prompt's end.
        let lanes = subgroup.max(8);
        PrefillVariant {
            subgroup,
            lanes,
            rows_per_lane,
            step_keys: 2,
            split_keys: PREFILL_SPLIT_KEYS,
            order: ItemOrder::Alternating,
        }
    } else {
        let rows_per_lane = if row_words <= 96 { 2 } else { 1 };
        PrefillVariant {
            subgroup,
            lanes: 64,
            rows_per_lane,
            step_keys: 4,
            split_keys: PREFILL_SPLIT_KEYS,
            order: ItemOrder::LargeFirst,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::mesa_major;

    #[test]
    fn mesa_versions() {
        assert_eq!(mesa_major("Mesa 22.3.6 (LLVM 15.0.6)"), Some(22));
        assert_eq!(mesa_major("Mesa 26.2.6-1 (LLVM 22.1.8)"), Some(26));
        assert_eq!(mesa_major("4.5 (Core Profile) Mesa 22.3.6"), Some(22));
        assert_eq!(mesa_major("535.129.03"), None);
        assert_eq!(mesa_major("Mesa devel"), None);
    }
}
