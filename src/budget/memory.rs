//! A device's memory part by part.

use super::lengths::{Lengths, Mean};
use super::{BudgetError, product};
use crate::attention::{AttentionConfig, Workspace};
use crate::geometry::PageSize;
use crate::kernels::{Tiles, Variants};
use crate::kv::{SegmentGroups, SourceVectors, append_buffer_bytes};
use crate::plan::{Need, Setting, StepMax, check_lengths, check_rows, count, plan_buffer_bytes, workspace_bytes};

/// Different lengths that a [`MemoryModel`] goes through at most.
pub const DISTINCT_LENGTHS_MAX: u64 = 1 << 24;

/// What shares the memory of a device. All sizes are in bytes, on this device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryConfig {
    /// Heads, types and page size. The pool's page count is not looked at: it is what comes out.
    pub attention: AttentionConfig,
    /// How the kernels are built; the size of plans and of partial states depends on it a little.
    pub variants: Variants,
    /// Layers, each with pages of its own; all other buffers of a step serve one layer after the other.
    pub layers: u32,
    /// Query rows of a prompt that a step takes at most: the longest length or more for prompts in one piece.
    pub prefill_rows: u32,
    /// Activations of the model per query row, beside the rows that attention reads and writes.
    pub activation_row_bytes: u64,
    /// The model's weights.
    pub weights: u64,
    /// Buffers for exchange with other devices.
    pub communication: u64,
    /// Whatever else lies there.
    pub other: u64,
    /// What is to stay free.
    pub headroom: u64,
}

/// What each part of a device's memory takes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// As configured.
    pub weights: u64,
    /// Query, output, log-sum-exp and new key and value rows of a layer, and the model's own activations.
    pub activations: u64,
    /// Partial states of split sequences.
    pub workspace: u64,
    /// As configured.
    pub communication: u64,
    /// Pages of all layers, unused slots and padding included.
    pub kv: u64,
    /// Plans of attention and append with their page table, and the status words.
    pub metadata: u64,
    /// As configured.
    pub other: u64,
    /// As configured.
    pub headroom: u64,
}

impl Parts {
    /// The sum of all.
    pub fn total(&self) -> u128 {
        let Self { weights, activations, workspace, communication, kv, metadata, other, headroom } = *self;
        [weights, activations, workspace, communication, kv, metadata, other, headroom].map(u128::from).iter().sum()
    }

    /// The larger of each part.
    #[must_use]
    pub fn max(&self, other: &Self) -> Self {
        Self {
            weights: self.weights.max(other.weights),
            activations: self.activations.max(other.activations),
            workspace: self.workspace.max(other.workspace),
            communication: self.communication.max(other.communication),
            kv: self.kv.max(other.kv),
            metadata: self.metadata.max(other.metadata),
            other: self.other.max(other.other),
            headroom: self.headroom.max(other.headroom),
        }
    }
}

/// The memory of a number of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Requests that are held at the same time.
    pub requests: u64,
    /// Pages of each layer.
    pub pages: u32,
    /// While every request generates: one query row each.
    pub steady_decode: Parts,
    /// While one request, the longest, is at the last piece of its prompt, and all others generate.
    pub prefill_peak: Parts,
}

impl Budget {
    /// What must be there: buffers are made once, so each has the larger of its two sizes.
    pub fn needed(&self) -> Parts {
        self.steady_decode.max(&self.prefill_peak)
    }
}

/// The memory that requests of given lengths take.
///
/// Of each request the most is counted that it needs on its way to its last length ([`StepMax`] has the rule), and of many
/// requests the mean: of pages, of plan words, of partial states, each counted exactly over all lengths and rounded up for
/// all requests together; never less than the longest request needs. Lengths that happen to be above the mean together are
/// what head-room, or a scheduler that lets requests wait, is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryModel {
    config: MemoryConfig,
    tiles: Tiles,
    pages: Mean,
    longest_pages: u32,
    /// Plan words of a request that generates, page ids included.
    words: Mean,
    /// Partial states of a request that generates.
    states: Mean,
    /// The longest request generating.
    longest: Need,
    /// The longest request at any piece of its prompt, the last and largest included.
    prefill: Need,
    prefill_rows: u32,
}

impl MemoryModel {
    /// Counts what a request takes.
    ///
    /// # Errors
    /// [`BudgetError::Zero`] for layers or prefill rows; [`BudgetError::TooManyLengths`] for more than
    /// [`DISTINCT_LENGTHS_MAX`] different ones; [`BudgetError::Plan`], [`BudgetError::Layout`] or
    /// [`BudgetError::Append`] if not even one request can be planned.
    pub fn new(config: &MemoryConfig, lengths: &Lengths) -> Result<Self, BudgetError> {
        for (name, number) in [("layers", config.layers), ("prefill_rows", config.prefill_rows)] {
            if number == 0 {
                return Err(BudgetError::Zero { name });
            }
        }
        let (found, limit) = (lengths.distinct(), DISTINCT_LENGTHS_MAX);
        if found > limit {
            return Err(BudgetError::TooManyLengths { found, limit });
        }
        let layout = &config.attention.layout;
        let (geometry, page_size, longest) = (layout.geometry(), layout.page_size(), lengths.longest());
        let tiles = config.attention.kernels(config.variants).tiles();
        let prefill_rows = config.prefill_rows.min(longest);
        check_rows(prefill_rows, geometry, &tiles)?;
        let AttentionConfig { layout, options, extras, .. } = &config.attention;
        let (pool, workspace_max) = (&SegmentGroups::whole(layout), u64::MAX);
        let setting = Setting { pool, options, extras, tiles: &tiles, workspace_max };
        let most = |q_len, kv_len| {
            check_lengths(0, options, (q_len, kv_len))?;
            Ok::<_, BudgetError>(StepMax { sequences: 1, q_len, kv_len, ..StepMax::default() }.need(&setting))
        };
        let model = Self {
            config: *config,
            tiles,
            pages: lengths.pages(page_size),
            longest_pages: page_size.pages_for(longest),
            words: lengths.mean_of("the plan", |tokens| Ok(most(1, tokens)?.words))?,
            states: lengths.mean_of("the workspace", |tokens| Ok(most(1, tokens)?.states))?,
            longest: most(1, longest)?,
            prefill: most(prefill_rows, longest)?,
            prefill_rows,
        };
        model.budget(1).map(|_| model)
    }

    /// The same where every request reserves `tokens` tokens, at least the longest length, one after the other: a page
    /// of that size each.
    ///
    /// # Errors
    /// As [`MemoryModel::new`]; [`BudgetError::Reserved`].
    pub fn reserving(config: &MemoryConfig, lengths: &Lengths, tokens: u32) -> Result<Self, BudgetError> {
        lengths.reserved_waste(tokens)?;
        let layout = &config.attention.layout;
        let page_size = PageSize::new(tokens).map_err(|_| BudgetError::Zero { name: "reserved tokens" })?;
        let layout = layout.with_pages(page_size, 1)?;
        Self::new(&MemoryConfig { attention: AttentionConfig { layout, ..config.attention }, ..*config }, lengths)
    }

    /// The memory of `requests` requests.
    ///
    /// # Errors
    /// [`BudgetError::Overflow`] past 64 bits; [`BudgetError::Plan`], [`BudgetError::Layout`] or
    /// [`BudgetError::Append`] for more than one call can take.
    pub fn budget(&self, requests: u64) -> Result<Budget, BudgetError> {
        let MemoryConfig { weights, communication, other, headroom, .. } = self.config;
        let fixed = Parts { weights, communication, other, headroom, ..Parts::default() };
        let Some(others) = requests.checked_sub(1) else {
            return Ok(Budget { requests, pages: 0, steady_decode: fixed, prefill_peak: fixed });
        };
        let layout = &self.config.attention.layout;
        let pages = count("pages", self.pages.of_requests(requests)?)?.max(self.longest_pages);
        let layer = layout.with_pages(layout.page_size(), pages)?;
        let kv = product("the size of all pages in bytes", layer.bytes(), self.config.layers.into())?;
        let parts = Parts { kv, ..fixed };
        Ok(Budget {
            requests,
            pages,
            steady_decode: self.step(requests, false, parts)?,
            prefill_peak: self.step(others, true, parts)?,
        })
    }

    /// The largest number of requests whose [`Budget::needed`] is at most `memory` bytes and that one call can take.
    /// Why one more is too many, [`MemoryModel::budget`] says.
    pub fn requests_in(&self, memory: u64) -> u64 {
        let fits = |requests| self.budget(requests).is_ok_and(|budget| budget.needed().total() <= memory.into());
        // What is needed never falls with another request, and a call has fewer than 2^32 rows.
        let (mut most, mut too_many) = (0, 1_u64 << 32);
        while too_many - most > 1 {
            let middle = most + (too_many - most) / 2;
            if fits(middle) {
                most = middle;
            } else {
                too_many = middle;
            }
        }
        most
    }

    /// Adds what a step of `decodes` generating requests takes, and of a prompt where there is one.
    fn step(&self, decodes: u64, prompt: bool, parts: Parts) -> Result<Parts, BudgetError> {
        let attention = &self.config.attention;
        let prompt_rows = if prompt { self.prefill_rows } else { 0 };
        let rows = count("query rows", decodes.saturating_add(prompt_rows.into()))?;
        check_rows(rows, attention.layout.geometry(), &self.tiles)?;
        let sum = |mean: Mean, prefill: u64, longest: u64| {
            let decodes = mean.of_requests(decodes)?;
            Ok::<_, BudgetError>(if prompt { decodes.saturating_add(prefill) } else { decodes.max(longest) })
        };
        let words = count("plan words", sum(self.words, self.prefill.words, self.longest.words)?)?;
        let states = sum(self.states, self.prefill.states, self.longest.states)?;
        let bytes = attention.buffer_bytes(rows);
        let [k, v] = SourceVectors::new(&attention.layout, &attention.new_rows, rows)?.bytes();
        let what = "the size of the activations in bytes";
        let model = product(what, self.config.activation_row_bytes, rows.into())?;
        // Rows that have passed the checks are below 2^32 vectors of 16 bytes each.
        let activations = model.checked_add(bytes.q + bytes.out + bytes.lse + k + v);
        Ok(Parts {
            activations: activations.ok_or(BudgetError::Overflow { what })?,
            workspace: Workspace::buffer_bytes(workspace_bytes(states, &self.tiles)?),
            metadata: plan_buffer_bytes(1, words.into()) + append_buffer_bytes(&attention.new_rows, rows),
            ..parts
        })
    }
}
