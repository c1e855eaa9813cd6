//! `paged-attention doctor`: which adapter would be used, why, and whether its kernels work.

use std::fmt::Write;

use paged_attention::{Tuning, TuningEntry, adapter};
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::attend::{complain, print, printed, write_out};
use crate::choosing::{Choosing, Chosen};
use crate::device::Device;
use crate::report::{self, AdapterName};
use crate::selftest::{self, Verdict};

/// One adapter and how it did.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Examined {
    /// What `--adapter` takes.
    index: usize,
    #[serde(flatten)]
    name: AdapterName,
    kind: String,
    /// Whether `attend` would use it with the same `--adapter`.
    chosen: bool,
    /// Why, or why not.
    reason: String,
    features: Features,
    limits: Limits,
    /// Whether every kernel passed.
    passed: bool,
    /// Why no kernel was tried, though nothing is known to be wrong.
    skipped: Option<String>,
    /// Why no kernel ran.
    error: Option<String>,
    kernels: Vec<Verdict>,
    /// What became of the tuning table; null without one.
    tuning: Option<TableUse>,
}

/// A tuning table on an adapter.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct TableUse {
    /// Why the table is not used, and the rule is.
    refused: Option<String>,
    entries: Vec<EntryUse>,
}

/// An entry of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct EntryUse {
    /// Such as `group=1 head_dim=64 v_head_dim=64 q=f32 kv=f32 out=f32`.
    shape: String,
    /// The variants that are used for the shape: the entry's, if they pass the self-test.
    chosen: Option<Chosen>,
    /// Why there are none.
    error: Option<String>,
}

/// Features that decide between variants of a kernel.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Features {
    shader_f16: bool,
    subgroups: bool,
    subgroup_min_size: u32,
    subgroup_max_size: u32,
    timestamps: bool,
}

/// Limits that the kernels meet first.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Limits {
    storage_binding_bytes: u64,
    buffer_bytes: u64,
    workgroup_memory_bytes: u32,
    workgroup_invocations: u32,
    workgroups_per_axis: u32,
    storage_buffers_per_stage: u32,
}

/// The whole report.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Diagnosis {
    exit: u8,
    adapters: Vec<Examined>,
    advice: Option<String>,
}

/// Runs the subcommand and returns the exit status.
pub fn run(args: &DoctorArgs) -> u8 {
    let choosing = match Choosing::load(&args.choosing) {
        Ok(choosing) => choosing,
        Err(error) => {
            complain(&error);
            return report::UNUSABLE;
        }
    };
    let adapters = pollster::block_on(adapter::discover_all());
    let infos: Vec<_> = adapters.iter().map(wgpu::Adapter::get_info).collect();
    if infos.is_empty() {
        complain(&adapter::AdapterError::none_discovered());
        return report::NO_DEVICE;
    }
    let asked_for = args.adapter.is_some();
    let chosen = match adapter::select(&infos, args.adapter.as_deref()) {
        Ok(chosen) => chosen,
        Err(error) => {
            complain(&error);
            return report::NO_DEVICE;
        }
    };
    let mut examined = Vec::new();
    let mut written = Ok(());
    for (index, adapter) in adapters.into_iter().enumerate().filter(|(index, _)| !asked_for || *index == chosen) {
        let skipped = if asked_for { None } else { skipped(&infos, index) };
        let reason = reason(&infos, index, chosen, asked_for);
        let one = examine(index, adapter, index == chosen, reason, skipped, &choosing);
        if !args.json && written.is_ok() {
            written = write_out(&describe(&one));
        }
        examined.push(one);
    }
    let diagnosis = Diagnosis {
        exit: if examined.iter().any(|adapter| adapter.passed) { report::PASSED } else { report::NO_DEVICE },
        advice: advice(&examined),
        adapters: examined,
    };
    match &diagnosis.advice {
        _ if args.json => written = print(true, &diagnosis, String::new),
        Some(advice) if written.is_ok() => written = write_out(advice),
        _ => {}
    }
    printed(written, diagnosis.exit)
}

/// Why an adapter is not tried unless asked for.
fn skipped(infos: &[wgpu::AdapterInfo], index: usize) -> Option<String> {
    let is_software = |info: &wgpu::AdapterInfo| adapter::kind(info) == adapter::Kind::Software;
    let is_gl = |info: &wgpu::AdapterInfo| info.backend == wgpu::Backend::Gl;
    let own = infos.get(index)?;
    let other = infos.iter().position(|info| is_software(info) && !is_gl(info));
    other.filter(|_| is_software(own) && is_gl(own)).map(|other| {
        format!(
            "not tested: adapter {other} is a software renderer as well, and this one takes minutes to compile; \
             --adapter {index} tests it"
        )
    })
}

/// Why an adapter is chosen, or not.
fn reason(infos: &[wgpu::AdapterInfo], index: usize, chosen: usize, asked_for: bool) -> String {
    let (Some(own), Some(best)) = (infos.get(index), infos.get(chosen)) else {
        return String::new();
    };
    let (kind, best_kind) = (adapter::kind(own), adapter::kind(best));
    if asked_for {
        format!("asked for with --adapter; {kind}")
    } else if index == chosen {
        match infos.len() {
            1 => format!("{kind}, the only adapter there is"),
            _ => format!("{kind} through {}, the best rank", own.backend),
        }
    } else if own.backend == wgpu::Backend::Gl && best.backend != wgpu::Backend::Gl && kind <= best_kind {
        format!("{kind}, but through OpenGL, which ranks after {}; --adapter {index} takes it", best.backend)
    } else if kind != best_kind {
        format!("{kind}, which ranks after {best_kind}")
    } else {
        format!("{kind} as well, but listed later")
    }
}

fn examine(
    index: usize,
    adapter: wgpu::Adapter,
    chosen: bool,
    reason: String,
    skipped: Option<String>,
    choosing: &Choosing,
) -> Examined {
    let info = adapter.get_info();
    let (features, limits) = (adapter.features(), adapter.limits());
    let mut examined = Examined {
        index,
        name: AdapterName::new(&info),
        kind: adapter::kind(&info).to_string(),
        chosen,
        reason,
        features: Features {
            shader_f16: features.contains(wgpu::Features::SHADER_F16),
            subgroups: features.contains(wgpu::Features::SUBGROUP),
            subgroup_min_size: info.subgroup_min_size,
            subgroup_max_size: info.subgroup_max_size,
            timestamps: features.contains(wgpu::Features::TIMESTAMP_QUERY),
        },
        limits: Limits {
            storage_binding_bytes: limits.max_storage_buffer_binding_size,
            buffer_bytes: limits.max_buffer_size,
            workgroup_memory_bytes: limits.max_compute_workgroup_storage_size,
            workgroup_invocations: limits.max_compute_invocations_per_workgroup,
            workgroups_per_axis: limits.max_compute_workgroups_per_dimension,
            storage_buffers_per_stage: limits.max_storage_buffers_per_shader_stage,
        },
        passed: false,
        skipped,
        error: None,
        kernels: Vec::new(),
        tuning: None,
    };
    if examined.skipped.is_some() {
        return examined;
    }
    eprintln!("adapter {index}: {}", adapter::describe(&info));
    match Device::new(adapter) {
        Ok(mut device) => {
            // A table is for one adapter; the others go by the rule.
            let refused = device.choose_by(choosing.clone()).err().map(|error| error.to_string());
            for test in &selftest::all() {
                eprintln!("adapter {index}: compiling and testing {}", test.kernel);
                examined.kernels.push(test.run(&mut device));
            }
            examined.passed = examined.kernels.iter().all(|kernel| kernel.passed);
            examined.tuning = choosing.tuning().map(|tuning| TableUse {
                entries: if refused.is_none() { entries(&mut device, tuning) } else { Vec::new() },
                refused,
            });
        }
        Err(error) => examined.error = Some(error),
    }
    examined
}

/// Has every entry of a table tested.
fn entries(device: &mut Device, tuning: &Tuning) -> Vec<EntryUse> {
    let entry = |entry: &TuningEntry| {
        let shape = entry.shape();
        eprintln!("tuning table: compiling and testing {shape}");
        let (chosen, error) = match device.choose(&shape.config(entry.variants())) {
            Ok(choice) => (Some(Chosen::from(&choice)), None),
            Err(error) => (None, Some(error)),
        };
        EntryUse { shape: shape.to_string(), chosen, error }
    };
    tuning.entries().iter().map(entry).collect()
}

/// What to do where the chosen adapter is not the one to use.
fn advice(examined: &[Examined]) -> Option<String> {
    let chosen = examined.iter().find(|adapter| adapter.chosen)?;
    if chosen.passed {
        return (chosen.kind == adapter::Kind::Software.to_string()).then(|| {
            format!(
                "only a software renderer would be used; it is exact but slow. For a GPU, {}",
                adapter::INSTALL_HINT
            )
        });
    }
    Some(match examined.iter().find(|adapter| adapter.passed) {
        Some(other) => {
            format!("the adapter of choice fails; --adapter {} ({}) passes", other.index, other.name.adapter)
        }
        None => format!("no adapter passes; update the GPU's driver, or {}", adapter::INSTALL_HINT),
    })
}

/// Writing to a String does not fail, so the results are dropped.
fn describe(examined: &Examined) -> String {
    let mut text = String::new();
    let Examined { index, name, features, limits, .. } = examined;
    let mark = if examined.chosen { "*" } else { " " };
    let _ = writeln!(text, "{mark}{index}  {} ({}, {})", name.adapter, name.backend, name.driver);
    let mut line = |label: &str, value: &str| {
        let _ = writeln!(text, "    {label:<9} {value}");
    };
    line(if examined.chosen { "chosen" } else { "not used" }, &examined.reason);
    let yes = |has: bool| if has { "yes" } else { "no" };
    let subgroups = match (features.subgroups, features.subgroup_min_size, features.subgroup_max_size) {
        (false, ..) => "no".to_owned(),
        (true, min, max) if min == max => format!("of {min}"),
        (true, min, max) => format!("of {min} to {max}"),
    };
    line(
        "features",
        &format!("f16 {}, subgroups {subgroups}, timestamps {}", yes(features.shader_f16), yes(features.timestamps)),
    );
    line(
        "limits",
        &format!(
            "binding {} MiB, buffer {} MiB, workgroup memory {} KiB, {} invocations, {} workgroups per axis, {} \
             storage buffers per stage",
            limits.storage_binding_bytes >> 20,
            limits.buffer_bytes >> 20,
            limits.workgroup_memory_bytes >> 10,
            limits.workgroup_invocations,
            limits.workgroups_per_axis,
            limits.storage_buffers_per_stage
        ),
    );
    if let Some(why) = &examined.skipped {
        line("kernels", why);
    }
    if let Some(error) = &examined.error {
        line("failed", error);
    }
    for kernel in &examined.kernels {
        let own = kernel.ran.iter().find(|used| used.name.starts_with(kernel.kernel));
        let used = own.map_or(String::new(), |used| format!(": {}, {}", used.name, used.reason));
        let verdict = match (&kernel.error, kernel.max_bound_ratio) {
            (Some(error), _) => format!("FAILED: {error}"),
            (None, Some(ratio)) => format!("ok, measured/bound {ratio:.3}"),
            (None, None) => "ok".to_owned(),
        };
        line(kernel.kernel, &format!("{verdict}{used}"));
        kernel.chosen.iter().flat_map(Chosen::lines).for_each(|chosen| line("", &chosen));
    }
    if let Some(TableUse { refused, entries }) = &examined.tuning {
        if let Some(why) = refused {
            line("tuning", &format!("by the rule instead: {why}"));
        }
        for EntryUse { shape, chosen, error } in entries {
            line("tuning", shape);
            if let Some(chosen) = chosen {
                line("", &chosen.variants.to_string());
            }
            chosen.iter().flat_map(Chosen::lines).chain(error.clone()).for_each(|chosen| line("", &chosen));
        }
    }
    text.push('\n');
    text
}
