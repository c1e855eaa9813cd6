//! Exact attention over a paged KV cache on any GPU, through [`wgpu`].
//!
//! The steps, each a type: a [`Batch`] of ragged query rows and page tables is planned on the host
//! ([`Attention::plan`]), the [`Plan`] goes to the device once per step ([`DevicePlan::upload`]), is bound to each layer's
//! buffers ([`Attention::bind`]) and recorded into the caller's compute pass ([`Call::encode`]). [`Append`] writes new
//! keys and values into the pages the same way. Device, queue and buffers are the caller's; nothing is submitted or
//! waited for, except by [`Runner`], which takes host tensors and returns host tensors.
//!
//! A step of a server: [`BlockPool::extend`] every table and [`BatchBuilder::push`] it; [`KvStore::copies`], if the pool asked
//! for any; [`Append::write`] and [`DevicePlan::write`]; then in one pass [`AppendCall::encode`] and [`Call::encode`]; the
//! [`Status`] of the [`Workspace`], which all calls share, is copied out and checked. [`Attention::capacity`] says what has to be
//! reserved once.
//!
//! Prefixes that sequences share are read once where the plan is told of them ([`Attention::plan_shared`]), and
//! [`States::merge`] joins results over different keys on the host.
//!
//! [`budget`] counts what the pages take, and how many requests fit into a device's memory.
//! Which variants of the kernels run is decided by a rule and a self-test; [`Runner::tune`] measures them instead, for a
//! table ([`Tuning`]) that the caller keeps, and [`Preference`] has the other wishes.
//!
//! [`mod@reference`] has the same attention in float64 and a bound on the kernels' error; [`verify()`] judges a result.
//!
//! The numerical contract: whatever the storage types, scores, row maxima, row sums and weighted sums are in f32; masking
//! is structural; rows that see no key are exactly 0 with a log-sum-exp of `-inf`, or of the sink; every element is inside
//! [`reference::bound`]; and on one adapter and driver the bits do not depend on page placement (in pools of no more segments
//! than a dispatch binds, [`KvLayout`]), page size, batch neighbours, or anything in memory that no sequence owns. Owned values must be finite and scores inside
//! [`SCORE_LOG2_MAX`].
//!
//! The README has an example of embedding, the limits, and the versions.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

pub mod adapter;
mod attention;
mod batch;
pub mod budget;
mod buffers;
mod case;
mod chains;
mod geometry;
pub mod kernels;
mod kv;
mod merge;
mod plan;
pub mod reference;
mod runner;
mod selftest;
mod status;
mod tensor;
mod tuning;
mod verify;
mod verify_storage;

pub use attention::{Attention, AttentionConfig, AttentionIo, Bias, BindError, BufferBytes, Call, Extras, Workspace};
pub use batch::{Batch, BatchBuilder, BatchError, NO_PAGE};
pub use buffers::OutOfMemory;
pub use case::{
    AttentionOptions, CASE_BYTES_MAX, CASE_SCORES_MAX, Case, CaseError, CaseExtras, KvSource, SCORE_LOG2_MAX,
    SEQUENCE_BYTES_MAX, SOFTCAP_MAX, SOFTCAP_MIN, SequenceKv,
};
pub use chains::Chains;
pub use geometry::{Dtype, GeometryError, HEAD_DIM_MAX, HeadGeometry, PageSize, ROW_ALIGN, V_HEAD_DIM_MAX, padded_dim};
pub use kernels::{BuildError, KernelConfig, Kernels, Modifiers};
pub use kv::{
    Append, AppendCall, AppendError, AppendPlan, AppendSource, BlockPool, BlockTable, CopyError, FP8_MAX,
    HEAD_SCALE_MAX, HEAD_SCALE_MIN, INT8_MAX, InvariantError, KvDtype, KvDtypeError, KvDtypes, KvLayout, KvStore,
    LayoutError, Namespace, NewRows, PageCopies, PageCopy, PageCounts, Pairing, PoolConfig, PoolError, PoolView,
    PrefixStats, Refused, Rotary, RotaryError, RotaryShape, Rotation, RowLayout, RowOrder, StoreError, SwappedTable,
    ToHost, TokenChain, fp8_to_f32,
};
pub use merge::{MergeError, Real, States};
pub use plan::{
    DevicePlan, Plan, PlanCapacity, PlanError, SharedPrefix, SharedPrefixError, Slice, StepMax, UploadError, WriteError,
};
pub use runner::{
    Choice, ChosenBy, CompileTimes, KernelUse, Output, Preference, RunError, RunOptions, Runner, SUBMIT_TIME, StoredKv,
    TUNE_BUDGET, Tuned,
};
pub use selftest::SelfTestError;
pub use status::{STATUS_BYTES, Status, StatusError};
pub use tensor::{Tensor, TensorError};
pub use tuning::{Timing, Tuning, TuningEntry, TuningError, TuningKey};

pub use verify::{Computed, Quantity, Report, VerifyError, Worst, verify};
pub use verify_storage::{StorageReport, verify_storage};
pub use wgpu;
