//! An adapter with a runner on it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use paged_attention::kernels::{AdapterFacts, KernelConfig, Variants};
use paged_attention::{Case, Choice, Output, RunOptions, Runner, adapter};

use crate::report::AdapterName;

/// An opened adapter.
pub struct Device {
    adapter: wgpu::Adapter,
    name: AdapterName,
    /// Lost after a failure; the next case opens the device again.
    runner: Option<Runner>,
}

/// Opens the adapter that is asked for, or the best.
pub fn open(wanted: Option<&str>) -> Result<Device, String> {
    let adapter = pollster::block_on(adapter::discover(wanted)).map_err(|error| error.to_string())?;
    let info = adapter.get_info();
    Device::new(adapter).map_err(|error| format!("{}: {error}", adapter::describe(&info)))
}

impl Device {
    /// Opens a device on `adapter`.
    pub fn new(adapter: wgpu::Adapter) -> Result<Self, String> {
        let info = adapter.get_info();
        let mut device = Self { adapter, name: AdapterName::new(&info), runner: None };
        device.runner = Some(device.open_runner()?);
        Ok(device)
    }

    /// The adapter's name.
    pub fn name(&self) -> &AdapterName {
        &self.name
    }

    fn open_runner(&self) -> Result<Runner, String> {
        guard(|| Runner::new(&self.adapter).map_err(|error| error.to_string()))
    }

    /// Chooses the variants that [`Device::run`] takes for a case: compiles and tests them.
    pub fn choose(&mut self, case: &Case, options: &RunOptions) -> Result<Choice, String> {
        self.with_runner(|runner| runner.choose(&config(runner, case, options)).map_err(|error| error.to_string()))
    }

    /// Runs one case.
    pub fn run(&mut self, case: &Case, options: &RunOptions) -> Result<Output, String> {
        self.with_runner(|runner| runner.run(case, options).map_err(|error| error.to_string()))
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

/// The configuration that a case is run with; the variants are the runner's to choose.
fn config(runner: &Runner, case: &Case, options: &RunOptions) -> KernelConfig {
    let variants = Variants::base(&AdapterFacts::new(runner.adapter_info(), runner.device()), case.geometry());
    options.kernels(case, variants)
}

/// A panic, in a driver's bindings or in our own code, counts as a failure of the device: exit status 3, and the
/// other cases still run. The panic's own message is on standard error by then.
pub fn guard<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err("the run was broken off by a panic, which is a bug; please report it".to_owned()))
}
