//! Which kernels run: the flags that ask for some, and what reports say of the choice.

use std::path::{Path, PathBuf};

use clap::Args;
use paged_attention::kernels::{AdapterFacts, NameError, Variants};
use paged_attention::{Choice, CompileTimes, HeadGeometry, Preference, Runner, Tuning, TuningError};
use serde::Serialize;

use crate::error::InputError;

/// Flags about kernels.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Which kernels run")]
pub struct ChoosingFlags {
    /// `chosen` by rule or table and tested; `quick` to compile; `base`, without device features; or PREFILL+DECODE by
    /// name, untested
    #[arg(long, value_name = "WHICH", value_parser = parse_which, default_value = "chosen")]
    pub variants: Which,

    /// Choose by this table, which `paged-attention tune` has made on the same adapter, driver and version
    #[arg(long, value_name = "FILE")]
    pub tuning: Option<PathBuf>,
}

/// `--variants`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// What the rule or a table prefers, if it passes the self-test.
    Chosen,
    /// What compiles in little time, if it passes the self-test.
    Quick,
    /// What needs no device feature.
    Base,
    /// These.
    Named(Variants),
}

fn parse_which(text: &str) -> Result<Which, String> {
    match text {
        "chosen" => Ok(Which::Chosen),
        "quick" => Ok(Which::Quick),
        "base" => Ok(Which::Base),
        _ => text.parse().map(Which::Named).map_err(|error: NameError| {
            format!("chosen, quick, base, or the names of two variants are needed: {error}")
        }),
    }
}

impl std::fmt::Display for Which {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Chosen => f.write_str("chosen"),
            Self::Quick => f.write_str("quick"),
            Self::Base => f.write_str("base"),
            Self::Named(variants) => variants.fmt(f),
        }
    }
}

/// The flags, read and checked without an adapter.
#[derive(Clone, Debug)]
pub struct Choosing {
    which: Which,
    /// The table, and the file that it is from.
    tuning: Option<(PathBuf, Tuning)>,
}

fn unusable(path: &Path, why: impl ToString) -> InputError {
    InputError::Tuning { path: path.to_owned(), why: why.to_string() }
}

impl Choosing {
    /// The flags' defaults.
    pub const BY_RULE: Self = Self { which: Which::Chosen, tuning: None };

    /// Reads the table.
    pub fn load(flags: &ChoosingFlags) -> Result<Self, InputError> {
        let ChoosingFlags { variants: which, tuning } = flags;
        let tuning = match tuning {
            Some(path) if *which != Which::Chosen => {
                return Err(unusable(path, format_args!("--variants {which} leaves nothing to choose")));
            }
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|error| unusable(path, error))?;
                Some((path.clone(), text.parse().map_err(|error: TuningError| unusable(path, error))?))
            }
            None => None,
        };
        Ok(Self { which: *which, tuning })
    }

    /// Whether a runner is to choose, as opposed to being told.
    pub fn chooses(&self) -> bool {
        matches!(self.which, Which::Chosen | Which::Quick)
    }

    /// The table.
    pub fn tuning(&self) -> Option<&Tuning> {
        self.tuning.as_ref().map(|(_, tuning)| tuning)
    }

    /// Makes a runner choose so, unless the table is for another adapter, or the adapter has no subgroups of the size that the named
    /// variants need.
    pub fn apply(&self, runner: &mut Runner) -> Result<(), InputError> {
        let preference = match (&self.tuning, self.which) {
            (Some((_, tuning)), _) => Preference::Tuned(tuning.clone()),
            (None, Which::Quick) => Preference::QuickCompile,
            (None, _) => Preference::Rule,
        };
        if let Which::Named(variants) = &self.which {
            check_subgroups(variants, runner)?;
        }
        let path = self.tuning.as_ref().map_or(Path::new(""), |(path, _)| path);
        runner.prefer(preference).map_err(|error| unusable(path, error))
    }

    /// The variants that are used without a choice.
    pub fn forced(&self, runner: &Runner, geometry: &HeadGeometry) -> Option<Variants> {
        match self.which {
            Which::Chosen | Which::Quick => None,
            Which::Base => Some(Variants::base(&AdapterFacts::new(runner.adapter_info(), runner.device()), geometry)),
            Which::Named(variants) => Some(variants),
        }
    }
}

fn check_subgroups(variants: &Variants, runner: &Runner) -> Result<(), InputError> {
    let found = AdapterFacts::new(runner.adapter_info(), runner.device()).subgroup_sizes;
    let has = |size: u32| size == 0 || found.is_some_and(|(min, max)| (min..=max).contains(&size));
    let (prefill, decode) = (&variants.prefill, &variants.decode);
    for (variant, size) in [(prefill.to_string(), prefill.subgroup), (decode.to_string(), decode.subgroup())] {
        if !has(size) {
            let there = match found {
                Some((min, max)) if min == max => format!("subgroups of {min}"),
                Some((min, max)) => format!("subgroups of {min} to {max}"),
                None => "no subgroups".to_owned(),
            };
            let why = format!("{variant} needs subgroups of {size}; {} has {there}", runner.adapter_info().name);
            return Err(InputError::Flag { flag: "--variants", why });
        }
    }
    Ok(())
}

/// A pair of variants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pair {
    /// Such as `prefill-broadcast32-r2k4l64`.
    pub prefill: String,
    /// Such as `decode-exchange32`.
    pub decode: String,
}

impl From<&Variants> for Pair {
    fn from(variants: &Variants) -> Self {
        Self { prefill: variants.prefill.to_string(), decode: variants.decode.to_string() }
    }
}

impl std::fmt::Display for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}+{}", self.prefill, self.decode)
    }
}

/// The variants that the library chose, and those that it would have liked better.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Chosen {
    #[serde(flatten)]
    pub variants: Pair,
    /// `rule`, `rule-untuned`, `quick` or `tuning`.
    pub by: String,
    /// What the rule prefers.
    pub rule: Pair,
    /// Time to compile all kernels, and each.
    pub compile_ms: f64,
    pub compile: Compile,
    /// Variants that were preferred, and what was wrong with each.
    pub stepped_down: Vec<SteppedDown>,
}

/// Time to compile each kernel, its first dispatch included.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compile {
    pub prefill_ms: f64,
    pub decode_ms: f64,
    pub merge_ms: f64,
    pub append_ms: f64,
}

/// Variants that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SteppedDown {
    #[serde(flatten)]
    pub variants: Pair,
    pub reason: String,
}

impl From<&Choice> for Chosen {
    fn from(choice: &Choice) -> Self {
        let CompileTimes { prefill_ms, decode_ms, merge_ms, append_ms, .. } = choice.compile;
        let stepped_down = choice.stepped_down.iter();
        Self {
            variants: Pair::from(&choice.variants),
            by: choice.by.to_string(),
            rule: Pair::from(&choice.rule),
            compile_ms: choice.compile.total_ms(),
            compile: Compile { prefill_ms, decode_ms, merge_ms, append_ms },
            stepped_down: stepped_down
                .map(|(variants, reason)| SteppedDown { variants: Pair::from(variants), reason: reason.clone() })
                .collect(),
        }
    }
}

impl Chosen {
    /// How the variants were come to: a line, and one more for each that failed.
    pub fn lines(&self) -> Vec<String> {
        let by = match self.by.as_str() {
            "tuning" => "by the tuning table",
            "rule-untuned" => "by the rule: the tuning table has no entry for the shape",
            "quick" => "as quick to compile",
            _ => "by the rule",
        };
        let instead =
            if self.rule == self.variants { String::new() } else { format!("; the rule prefers {}", self.rule) };
        let Compile { prefill_ms, decode_ms, merge_ms, append_ms } = self.compile;
        let compiled = format!(
            "compiled in {:.0} ms (prefill {prefill_ms:.0}, decode {decode_ms:.0}, merge {merge_ms:.0}, append {append_ms:.0})",
            self.compile_ms
        );
        let failed = self.stepped_down.iter().map(|failed| format!("not {}: {}", failed.variants, failed.reason));
        std::iter::once(format!("{by}{instead}; {compiled}")).chain(failed).collect()
    }
}
