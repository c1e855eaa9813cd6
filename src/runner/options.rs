//! How a case is to be run.

use std::num::NonZeroU32;

use super::RunError;
use super::host::PageTable;
use crate::attention::{Bias, Extras, modifiers};
use crate::case::{Case, CaseExtras};
use crate::geometry::{Dtype, PageSize};
use crate::kernels::{KernelConfig, Variants};
use crate::kv::{AppendError, KvDtypes, KvLayout, NewRows, Rotary, RowOrder, SegmentGroups};
use crate::plan::{Plan, PlanError, Setting, SharedPrefix};

/// How a case is laid out and what comes back.
#[derive(Clone, Debug, PartialEq)]
pub struct RunOptions {
    /// Tokens per page for contiguous keys and values (a paged case has its own).
    pub page_size: PageSize,
    /// For contiguous keys and values: the page ids to use, one per page needed, each once; `None` takes
    /// them in order. Ids may exceed the number of pages needed: the pool then has spare pages.
    pub page_ids: Option<Vec<u32>>,
    /// Order of slot and head inside a page.
    pub order: RowOrder,
    /// Types in which the pages hold keys and values; `None` is the case's own.
    pub kv: Option<KvDtypes>,
    /// How keys of a contiguous case are rotated on their way into the pages: by their places in their sequences.
    pub rotary: Option<Rotary>,
    /// Type of the output rows: [`Dtype::F32`] or [`Dtype::F16`].
    pub out_dtype: Dtype,
    /// Pages per segment of the pool; `None` puts as many into one as the device can bind, and all if it can.
    pub segment_pages: Option<NonZeroU32>,
    /// Prefixes that sequences of a paged case share, each to be read once ([`SharedPrefix`]); none are looked for.
    pub shared_prefixes: Vec<SharedPrefix>,
    /// Variants of the kernels to use, untested; `None` leaves the choice to [`Runner::choose`](super::Runner::choose), or takes those without
    /// subgroups where there is no query row.
    pub variants: Option<Variants>,
    /// Multiply-adds of a submit at most ([`crate::Plan::cut`]); `None` goes by what the runner has measured
    /// ([`Runner::bound_submits`](super::Runner::bound_submits)). It changes no bit.
    pub submit_work_max: Option<u64>,
    /// Bytes of partial states at a time at most ([`crate::Attention::with_workspace_max`]); `None` is what the device can bind. It
    /// changes no bit.
    pub workspace_max: Option<u64>,
}

impl RunOptions {
    /// Pages of `page_size` in order, output in f32, the runner's choice of kernels.
    pub fn new(page_size: PageSize) -> Self {
        Self {
            page_size,
            page_ids: None,
            order: RowOrder::HeadSlot,
            kv: None,
            rotary: None,
            out_dtype: Dtype::F32,
            segment_pages: None,
            shared_prefixes: Vec::new(),
            variants: None,
            submit_work_max: None,
            workspace_max: None,
        }
    }

    /// The kernels that a run of `case` takes, built in the given way; for a pool in one segment, unless the options say
    /// otherwise.
    pub fn kernels(&self, case: &Case, variants: Variants) -> KernelConfig {
        // A case that cannot be laid out has no pool.
        let layout = self.segment_pages.and_then(|_| self.lay_out(case).ok());
        KernelConfig {
            geometry: *case.geometry(),
            q: case.q().dtype(),
            kv: self.kv_dtypes(case),
            new_rows: self.new_rows(case),
            out: self.out_dtype,
            modifiers: modifiers(case.options(), &self.extras(case)),
            segments: layout.map_or(NonZeroU32::MIN, |(_, layout)| layout.segments()),
            variants,
        }
    }

    /// The types in which the pages of `case` hold keys and values.
    pub fn kv_dtypes(&self, case: &Case) -> KvDtypes {
        self.kv.unwrap_or_else(|| case.kv().dtype().into()).of(case.geometry())
    }

    /// The rows of `case` as an append finds them.
    pub(super) fn new_rows(&self, case: &Case) -> NewRows {
        NewRows { dtype: case.kv().dtype(), rotary: self.rotary.as_ref().map(Rotary::shape) }
    }

    /// Refuses what no device could run, without one: values outside the output type, page ids that do not fit the case,
    /// and pools or sequences past 32 bits. [`Runner::run`](super::Runner::run) checks it again.
    ///
    /// # Errors
    /// [`RunError::Case`], [`RunError::PageIds`], [`RunError::Layout`] or [`RunError::Plan`].
    pub fn validate(&self, case: &Case) -> Result<(), RunError> {
        self.lay_out(case).map(|_| ())
    }

    /// The plan of a run of `case` in these variants, made without a device.
    #[doc(hidden)]
    pub fn plan(&self, case: &Case, variants: Variants) -> Result<Plan, RunError> {
        let (table, layout) = self.lay_out(case)?;
        let (batch, extras, tiles) = (table.batch(case), self.extras(case), self.kernels(case, variants).tiles());
        let (prefixes, mask) = (&self.shared_prefixes, case.extras().mask.as_deref());
        let (pool, workspace_max) = (&SegmentGroups::whole(&layout), self.workspace_max.unwrap_or(u64::MAX));
        let setting = Setting { pool, options: case.options(), extras: &extras, tiles: &tiles, workspace_max };
        Ok(Plan::new(&batch, &setting, prefixes, mask)?)
    }

    /// The page table and the pool that a run will have.
    pub(super) fn lay_out(&self, case: &Case) -> Result<(PageTable, KvLayout), RunError> {
        case.validate_out(self.out_dtype)?;
        for (seq, (q_len, kv_len)) in case.lengths().into_iter().enumerate() {
            if q_len.checked_add(kv_len).is_none() {
                return Err(PlanError::TooLong { seq, q_len, kv_len }.into());
            }
        }
        if let Some(rotary) = &self.rotary {
            rotary.shape().check(case.geometry().head_dim()).map_err(AppendError::from)?;
            if case.page_size().is_some() {
                return Err(RunError::RotatedPages);
            }
        }
        let table = PageTable::new(case, self)?;
        let dtypes = self.kv_dtypes(case);
        case.validate_stored(dtypes)?;
        let layout = KvLayout::new(*case.geometry(), dtypes, table.page_size, table.page_count)?;
        let layout = layout.with_order(self.order);
        Ok((table, self.segment_pages.map_or(layout, |pages| layout.with_segment_pages(pages))))
    }

    /// What a case asks of a call besides its options.
    pub(super) fn extras(&self, case: &Case) -> Extras {
        let CaseExtras { alibi_slopes, sinks, mask, bias, .. } = case.extras();
        Extras {
            alibi_slopes: alibi_slopes.is_some(),
            sinks: sinks.is_some(),
            mask: mask.is_some(),
            bias: bias.as_ref().map(|bias| Bias {
                dtype: bias.dtype(),
                per_head: bias.shape().first().is_some_and(|heads| *heads > 1),
            }),
            shared_prefixes: !self.shared_prefixes.is_empty(),
        }
    }
}
