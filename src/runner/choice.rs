//! Which variants a runner uses, and by what it goes.

use std::fmt;

use super::{CompileTimes, RunError, Runner};
use crate::kernels::{KernelConfig, Variants};
use crate::selftest::self_test;
use crate::tuning::{Tuning, TuningError};

/// By what a runner chooses among the variants.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Preference {
    /// The rule: [`Variants::candidates`].
    #[default]
    Rule,
    /// What compiles in little time, though it may run slower: [`Variants::quick`].
    QuickCompile,
    /// What a table says; the rule for shapes that it does not have.
    Tuned(Tuning),
}

/// What a choice came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChosenBy {
    /// The rule.
    Rule,
    /// The rule, since the tuning table has no entry for the shape.
    RuleUntuned,
    /// The wish for a short compilation.
    QuickCompile,
    /// The tuning table.
    Tuning,
}

/// `rule`, `rule-untuned`, `quick` or `tuning`.
impl fmt::Display for ChosenBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rule => "rule",
            Self::RuleUntuned => "rule-untuned",
            Self::QuickCompile => "quick",
            Self::Tuning => "tuning",
        })
    }
}

/// Which variants were chosen for a shape, and why not the ones preferred to them.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Choice {
    /// The variants that passed the self-test.
    pub variants: Variants,
    /// What they came from.
    pub by: ChosenBy,
    /// What the rule prefers, whether it was tried or not.
    pub rule: Variants,
    /// Variants that were preferred to the chosen ones, and what was wrong with each.
    pub stepped_down: Vec<(Variants, String)>,
    /// How long the chosen kernels took to compile.
    pub compile: CompileTimes,
}

impl Runner {
    /// Makes the runner choose by something else than the rule. Pipelines stay; choices are made anew.
    ///
    /// # Errors
    /// [`TuningError::OtherKey`] for a table of another adapter, driver or version of the crate. The runner then goes by
    /// what it went by before.
    pub fn prefer(&mut self, preference: Preference) -> Result<(), TuningError> {
        if let Preference::Tuned(tuning) = &preference {
            tuning.check(&self.info)?;
        }
        self.preference = preference;
        self.choices.clear();
        Ok(())
    }

    /// Chooses among the variants for `config` (whose own are not looked at): the first that is preferred, by the rule
    /// ([`Variants::candidates`]) or as [`Runner::prefer`] says, and that computes a small case right, by the float64
    /// reference and the error bound. Where other variants than the rule's fail, the rule's come next. Compiles and
    /// runs what it tries, once per configuration, on the runner's own device. Blocks.
    ///
    /// An application with a device of its own builds what was chosen there:
    ///
    /// ```no_run
    /// # use paged_attention::kernels::{AdapterFacts, Variants};
    /// # use paged_attention::{Attention, AttentionConfig, Runner, wgpu};
    /// # async fn tested(
    /// #     adapter: &wgpu::Adapter, device: &wgpu::Device, config: &AttentionConfig,
    /// # ) -> Result<Attention, Box<dyn std::error::Error>> {
    /// let any = Variants::base(&AdapterFacts::new(&adapter.get_info(), device), config.layout.geometry());
    /// let choice = Runner::new(adapter)?.choose(&config.kernels(any))?;
    /// let attention = Attention::with_variants(device, config, choice.variants).await?;
    /// # Ok(attention)
    /// # }
    /// ```
    ///
    /// # Errors
    /// Of the last candidate, which needs no device feature.
    pub fn choose(&mut self, config: &KernelConfig) -> Result<Choice, RunError> {
        let config = &config.within(&self.device.limits());
        let shape = config.shape();
        let key = (shape, config.new_rows, config.modifiers, config.segments);
        if let Some(choice) = self.choices.get(&key) {
            return Ok(choice.clone());
        }
        let (first, by_rule) = match &self.preference {
            Preference::Rule => (None, ChosenBy::Rule),
            Preference::QuickCompile => {
                (Some((ChosenBy::QuickCompile, Variants::quick(&self.facts, &config.geometry))), ChosenBy::Rule)
            }
            Preference::Tuned(tuning) => match tuning.entry(&shape) {
                Some(entry) => (Some((ChosenBy::Tuning, entry.variants())), ChosenBy::Rule),
                None => (None, ChosenBy::RuleUntuned),
            },
        };
        let choice = self.first_that_passes(config, first, by_rule)?;
        self.choices.insert(key, choice.clone());
        Ok(choice)
    }

    /// `first`, then the rule's candidates. The last of these needs no device feature.
    pub(super) fn first_that_passes(
        &mut self,
        config: &KernelConfig,
        first: Option<(ChosenBy, Variants)>,
        by_rule: ChosenBy,
    ) -> Result<Choice, RunError> {
        let rule = config.candidates(&self.facts);
        let preferred = rule.first().copied().unwrap_or(config.variants);
        let mut stepped_down: Vec<(Variants, String)> = Vec::new();
        let mut last = RunError::Failed("there are no variants".into());
        for (by, variants) in first.into_iter().chain(rule.into_iter().map(|variants| (by_rule, variants))) {
            if stepped_down.iter().any(|(tried, _)| *tried == variants) {
                continue;
            }
            match self.tested(&KernelConfig { variants, ..*config }) {
                Ok(compile) => return Ok(Choice { variants, by, rule: preferred, stepped_down, compile }),
                Err(error) => {
                    stepped_down.push((variants, error.to_string()));
                    last = error;
                }
            }
        }
        Err(last)
    }

    /// Compiles kernels and has them compute a small case; says how long they took to compile.
    pub(super) fn tested(&mut self, config: &KernelConfig) -> Result<CompileTimes, RunError> {
        let built = self.built(config)?;
        self_test(self, built.kernels.config())?;
        Ok(built.compile)
    }
}
