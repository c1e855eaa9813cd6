//! An adapter with a runner on it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use paged_attention::kernels::{AdapterFacts, KernelConfig, Variants};
use paged_attention::{Case, Choice, Output, RunOptions, Runner, Tuned, Tuning, adapter};

use crate::choosing::Choosing;
use crate::error::InputError;
use crate::report::{self, AdapterName};

/// An opened adapter.
pub struct Device {
    adapter: wgpu::Adapter,
    name: AdapterName,
    choosing: Choosing,
    /// Lost after a failure; the next case opens the device again.
    runner: Option<Runner>,
}

/// Opens the adapter that is asked for, or the best, for kernels that are chosen so. The error has its exit status.
pub fn open(wanted: Option<&str>, choosing: Choosing) -> Result<Device, (u8, String)> {
    let no_device = |message: String| (report::NO_DEVICE, message);
    let adapter = pollster::block_on(adapter::discover(wanted)).map_err(|error| no_device(error.to_string()))?;
    let info = adapter.get_info();
    let mut device =
        Device::new(adapter).map_err(|error| no_device(format!("{}: {error}", adapter::describe(&info))))?;
    device.choose_by(choosing).map_err(|error| (report::UNUSABLE, error.to_string()))?;
    Ok(device)
}

impl Device {
    /// Opens a device on `adapter`; kernels are chosen by the rule.
    pub fn new(adapter: wgpu::Adapter) -> Result<Self, String> {
        let info = adapter.get_info();
        let mut device = Self { adapter, name: AdapterName::new(&info), choosing: Choosing::BY_RULE, runner: None };
        device.runner = Some(device.open_runner()?);
        Ok(device)
    }

    /// Chooses kernels by something else, if the adapter is the one that it is for.
    pub fn choose_by(&mut self, choosing: Choosing) -> Result<(), InputError> {
        if let Some(runner) = &mut self.runner {
            choosing.apply(runner)?;
        }
        self.choosing = choosing;
        Ok(())
    }

    /// The adapter's name.
    pub fn name(&self) -> &AdapterName {
        &self.name
    }

    fn open_runner(&self) -> Result<Runner, String> {
        guard(|| {
            let mut runner = Runner::new(&self.adapter).map_err(|error| error.to_string())?;
            self.choosing.apply(&mut runner).map_err(|error| error.to_string())?;
            Ok(runner)
        })
    }

    /// Chooses the variants for a configuration, whose own are not looked at: compiles and tests them.
    pub fn choose(&mut self, config: &KernelConfig) -> Result<Choice, String> {
        self.with_runner(|runner| runner.choose(config).map_err(|error| error.to_string()))
    }

    /// The choice that [`Device::run`] makes for a case; none where the flags leave nothing to choose.
    pub fn choose_for(&mut self, case: &Case, options: &RunOptions) -> Result<Option<Choice>, String> {
        if !self.choosing.chooses() {
            return Ok(None);
        }
        let config = options.kernels(case, Variants::base(&AdapterFacts::PLAIN_GPU, case.geometry()));
        self.choose(&config).map(Some)
    }

    /// Runs one case.
    pub fn run(&mut self, case: &Case, options: &RunOptions) -> Result<Output, String> {
        let choosing = self.choosing.clone();
        self.with_runner(|runner| {
            let variants = choosing.forced(runner, case.geometry());
            let options = RunOptions { variants: options.variants.or(variants), ..options.clone() };
            runner.run(case, &options).map_err(|error| error.to_string())
        })
    }

    /// An empty table for the adapter.
    pub fn empty_table(&self) -> Tuning {
        Tuning::new(&self.adapter.get_info())
    }

    /// Measures the variants for a configuration.
    pub fn tune(&mut self, config: &KernelConfig, budget: Duration) -> Result<Tuned, String> {
        self.with_runner(|runner| runner.tune(config, budget).map_err(|error| error.to_string()))
    }

    /// After a failure the device is closed, since it may be lost.
    fn with_runner<T>(&mut self, work: impl FnOnce(&mut Runner) -> Result<T, String>) -> Result<T, String> {
        let mut runner = match self.runner.take() {
            Some(runner) => runner,
            None => self.open_runner()?,
        };
        let result = guard(|| work(&mut runner))?;
        self.runner = Some(runner);
        Ok(result)
    }
}

/// A panic, in a driver's bindings or in our own code, counts as a failure of the device: exit status 3, and the
/// other cases still run. The panic's own message is on standard error by then.
pub fn guard<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err("the run was broken off by a panic, which is a bug; please report it".to_owned()))
}
