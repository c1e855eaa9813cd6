//! Tables of measured variants: what a caller keeps of a device, and hands back at the next start.

#[cfg(test)]
mod tests;
mod text;

use std::fmt;

use thiserror::Error;

use crate::adapter;
use crate::kernels::{DecodeVariant, KernelShape, PrefillVariant, Variants};

/// A variant that takes at most so many times as long as the fastest counts as fast as it.
pub const NEAR: f64 = 1.05;

/// A table that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TuningError {
    /// It was made on another adapter, or with another driver or version of the crate.
    #[error("the tuning table was made for {found}; this is {needed}")]
    OtherKey {
        /// What it was made for.
        found: Box<TuningKey>,
        /// What it would have to be made for.
        needed: Box<TuningKey>,
    },
    /// A line of its text is not what it should be.
    #[error("line {line} of the tuning table: found {}; {needed} is needed", quoted(found))]
    Line {
        /// The line's number, from 1; one more than there are at the end.
        line: usize,
        /// The line, or the part of it that is wrong; empty at the end.
        found: String,
        /// What is needed there.
        needed: &'static str,
    },
}

fn quoted(found: &str) -> String {
    if found.is_empty() { "the end".to_owned() } else { format!("{found:?}") }
}

/// What a table depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TuningKey {
    version: String,
    adapter: String,
    backend: String,
    driver: String,
}

impl TuningKey {
    /// An adapter with its driver, and this version of the crate.
    pub fn new(info: &wgpu::AdapterInfo) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            adapter: one_line(&info.name),
            backend: info.backend.to_string(),
            driver: one_line(&adapter::driver(info)),
        }
    }

    /// Version of this crate.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Name of the adapter.
    pub fn adapter(&self) -> &str {
        &self.adapter
    }

    /// `vulkan`, `metal`, `dx12` or `gl`.
    pub fn backend(&self) -> &str {
        &self.backend
    }

    /// Driver and its version, as far as the backend tells.
    pub fn driver(&self) -> &str {
        &self.driver
    }
}

impl fmt::Display for TuningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, adapter, backend, driver } = self;
        write!(f, "{adapter} ({backend}, {driver}) and paged-attention {version}")
    }
}

/// Single spaces, no line ends: what a line of the text can hold.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// One variant's times, in milliseconds, to a tenth of a microsecond.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Timing<V> {
    /// The variant.
    pub variant: V,
    /// One call of the kernel on work that is like what it is for: the lower quartile of several rounds.
    pub run_ms: f64,
    /// Compiling, the first dispatch included. A driver that keeps what it has compiled on disk makes it short.
    pub compile_ms: f64,
}

/// What was measured for one shape: at least one variant of each kernel, first the one to use.
#[derive(Clone, Debug, PartialEq)]
pub struct TuningEntry {
    shape: KernelShape,
    variants: Variants,
    prefill: Vec<Timing<PrefillVariant>>,
    decode: Vec<Timing<DecodeVariant>>,
}

impl TuningEntry {
    /// Sorts what was measured; `None` where a kernel has no variant.
    pub(crate) fn measured(
        shape: KernelShape,
        prefill: Vec<Timing<PrefillVariant>>,
        decode: Vec<Timing<DecodeVariant>>,
    ) -> Option<Self> {
        Self::in_order(shape, sorted(prefill), sorted(decode))
    }

    /// The first ones are those to use.
    fn in_order(
        shape: KernelShape,
        prefill: Vec<Timing<PrefillVariant>>,
        decode: Vec<Timing<DecodeVariant>>,
    ) -> Option<Self> {
        let variants = Variants { prefill: prefill.first()?.variant, decode: decode.first()?.variant };
        Some(Self { shape, variants, prefill, decode })
    }

    /// What was measured.
    pub fn shape(&self) -> &KernelShape {
        &self.shape
    }

    /// The variants to use.
    pub fn variants(&self) -> Variants {
        self.variants
    }

    /// Prefill kernels, first the one to use, the others from fast to slow.
    pub fn prefill(&self) -> &[Timing<PrefillVariant>] {
        &self.prefill
    }

    /// Decode kernels, alike.
    pub fn decode(&self) -> &[Timing<DecodeVariant>] {
        &self.decode
    }
}

/// From fast to slow, but first the one to use: of those within [`NEAR`] of the fastest, the quickest to compile.
fn sorted<V>(timings: Vec<Timing<V>>) -> Vec<Timing<V>> {
    let tenths = |ms: f64| (ms * 1e4).round() / 1e4;
    let mut timings: Vec<_> = timings
        .into_iter()
        .map(|timing| Timing { run_ms: tenths(timing.run_ms), compile_ms: tenths(timing.compile_ms), ..timing })
        .collect();
    timings.sort_by(|a, b| a.run_ms.total_cmp(&b.run_ms));
    let near = timings.first().map_or(0.0, |fastest| fastest.run_ms * NEAR);
    let count = timings.iter().take_while(|timing| timing.run_ms <= near).count();
    let quickest = (0..).zip(timings.iter().take(count)).min_by(|(_, a), (_, b)| a.compile_ms.total_cmp(&b.compile_ms));
    if let Some((index, _)) = quickest {
        let chosen = timings.remove(index);
        timings.insert(0, chosen);
    }
    timings
}

/// What was measured on one adapter, an entry per shape.
///
/// Nothing is tuned unless it is asked for. [`crate::Runner::tune`] makes an entry, [`crate::Runner::prefer`] makes a
/// runner go by a table, and [`Tuning::variants`] serves whoever builds kernels without a runner. A table is good for the
/// adapter, the driver and the version of the crate that it was made with, and refused elsewhere. Other variants sum in
/// another order: the bits of a result are promised for one table, or for none.
///
/// ```no_run
/// use std::num::NonZeroU32;
///
/// use paged_attention::kernels::{AdapterFacts, Variants};
/// use paged_attention::{
///     Dtype, HeadGeometry, KernelConfig, Modifiers, Preference, Runner, TUNE_BUDGET, Tuning, adapter,
/// };
///
/// let adapter = pollster::block_on(adapter::discover(None))?;
/// let mut runner = Runner::new(&adapter)?;
/// let geometry = HeadGeometry::new(9, 3, 64)?;
/// let variants = Variants::base(&AdapterFacts::PLAIN_GPU, &geometry); // not looked at
/// let (q, kv, new_rows, out) = (Dtype::F32, Dtype::F16.into(), Dtype::F16.into(), Dtype::F32);
/// let (modifiers, segments) = (Modifiers::NONE, NonZeroU32::MIN);
/// let config = KernelConfig { geometry, q, kv, new_rows, out, modifiers, segments, variants };
/// let mut tuning = Tuning::new(runner.adapter_info());
/// tuning.insert(runner.tune(&config, TUNE_BUDGET)?.entry);
/// std::fs::write("table.txt", tuning.to_string())?;
///
/// // At the next start:
/// let tuning: Tuning = std::fs::read_to_string("table.txt")?.parse()?;
/// if let Err(error) = runner.prefer(Preference::Tuned(tuning)) {
///     eprintln!("{error}; the rule chooses");
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// As text it is a line per fact, and [`std::str::FromStr`] takes it back, comments and blank lines apart:
///
/// ```text
/// paged-attention tuning 1
/// version 0.1.0
/// adapter AMD Radeon 780M
/// backend vulkan
/// driver radv Mesa 25.0.7
///
/// # The first prefill and the first decode of a shape are used.
/// group=3 head_dim=64 v_head_dim=64 q=f16 kv=f16 out=f32
///   prefill-broadcast32-r1k4l64 run_ms=1.25 compile_ms=41.5
///   prefill-broadcast32-r2k4l64 run_ms=1.75 compile_ms=60.25
///   decode-exchange32 run_ms=0.5 compile_ms=30.125
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    key: TuningKey,
    entries: Vec<TuningEntry>,
}

impl Tuning {
    /// A table for an adapter, with no entry so far.
    pub fn new(info: &wgpu::AdapterInfo) -> Self {
        Self { key: TuningKey::new(info), entries: Vec::new() }
    }

    /// What the table was made for.
    pub fn key(&self) -> &TuningKey {
        &self.key
    }

    /// The entries, in the order in which their shapes came.
    pub fn entries(&self) -> &[TuningEntry] {
        &self.entries
    }

    /// Adds an entry, in the place of one of the same shape. It is to come from the adapter that the table is for.
    pub fn insert(&mut self, entry: TuningEntry) {
        match self.entries.iter_mut().find(|known| known.shape == entry.shape) {
            Some(known) => *known = entry,
            None => self.entries.push(entry),
        }
    }

    /// Whether the table was made on this adapter, with its driver and this version of the crate.
    ///
    /// # Errors
    /// [`TuningError::OtherKey`].
    pub fn check(&self, info: &wgpu::AdapterInfo) -> Result<(), TuningError> {
        let needed = TuningKey::new(info);
        if self.key == needed {
            return Ok(());
        }
        Err(TuningError::OtherKey { found: Box::new(self.key.clone()), needed: Box::new(needed) })
    }

    /// The variants to use for a shape on this adapter; `None` where there is no entry. They have not been tested since
    /// they were measured, which [`crate::Runner::choose`] does.
    ///
    /// # Errors
    /// As [`Tuning::check`].
    pub fn variants(&self, info: &wgpu::AdapterInfo, shape: &KernelShape) -> Result<Option<Variants>, TuningError> {
        self.check(info)?;
        Ok(self.entry(shape).map(TuningEntry::variants))
    }

    pub(crate) fn entry(&self, shape: &KernelShape) -> Option<&TuningEntry> {
        self.entries.iter().find(|entry| entry.shape == *shape)
    }
}
