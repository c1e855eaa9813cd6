//! An adapter with a runner on it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use paged_attention::{Case, Output, RunOptions, Runner, adapter};

use crate::report::AdapterName;

/// An opened adapter.
pub struct Device {
    adapter: wgpu::Adapter,
    name: AdapterName,
    /// Lost after a failure; the next case opens the device again.
    runner: Option<Runner>,
}

/// Obeys WGPU_BACKEND and wgpu's other variables.
pub fn instance() -> wgpu::Instance {
    wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env())
}

/// Opens the adapter that is asked for, or the best.
pub fn open(wanted: Option<&str>) -> Result<Device, String> {
    let adapter = pollster::block_on(adapter::find(&instance(), wanted)).map_err(|error| error.to_string())?;
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

    /// Runs one case. After a failure the device is closed, since it may be lost.
    pub fn run(&mut self, case: &Case, options: &RunOptions) -> Result<Output, String> {
        let mut runner = match self.runner.take() {
            Some(runner) => runner,
            None => self.open_runner()?,
        };
        let output = guard(|| runner.run(case, options).map_err(|error| error.to_string()))?;
        self.runner = Some(runner);
        Ok(output)
    }
}

/// A panic, in a driver's bindings or in our own code, counts as a failure of the device: exit status 3, and the
/// other cases still run. The panic's own message is on standard error by then.
pub fn guard<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err("the run was broken off by a panic, which is a bug; please report it".to_owned()))
}
