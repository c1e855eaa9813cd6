//! Which adapter to use: never a software one before a real one.
//!
//! An [`wgpu::Instance`] often lists the same GPU more than once (Vulkan and OpenGL), and a software renderer beside
//! it. [`rank`] puts that list in order, [`select`] picks from it by index or by name, and [`find`] does both on an
//! instance. The order is a function of [`wgpu::AdapterInfo`] alone, so it can be tested without a GPU and
//! explained to a user.
//!
//! [`discover`] makes the instance itself.
//!
//! An application that has a device already needs nothing of this.
//!
//! ```no_run
//! use paged_attention::{adapter, wgpu};
//!
//! // `_from_env`: WGPU_BACKEND=vulkan and the like then narrow the choice.
//! let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
//! let best = pollster::block_on(adapter::find(&instance, None))?;
//! let named = pollster::block_on(adapter::find(&instance, Some("radeon")))?;
//! # Ok::<(), adapter::AdapterError>(())
//! ```

use std::cmp::Reverse;
use std::fmt;

use thiserror::Error;

/// What to install where no adapter is found.
pub const INSTALL_HINT: &str = "install a Vulkan driver (on Debian and Ubuntu: mesa-vulkan-drivers, which also has a software \
     renderer; for NVIDIA GPUs the proprietary driver), or clear WGPU_BACKEND and VK_ICD_FILENAMES if they are set";

/// There is no adapter to use.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// The instance lists no adapter that computes.
    #[error("no GPU adapter was found: {INSTALL_HINT}")]
    None,
    /// `WGPU_BACKEND` is set, and its backends have no adapter that computes.
    #[error("no GPU adapter was found with WGPU_BACKEND=\"{backends}\", which allows no other backend: {INSTALL_HINT}")]
    Backends {
        /// What it is set to.
        backends: String,
    },
    /// No adapter has the index or name asked for.
    #[error("no adapter matches \"{wanted}\"; there are: {}", available.join("; "))]
    NoMatch {
        /// What was asked for.
        wanted: String,
        /// What there is, best first, as [`describe`] says it.
        available: Vec<String>,
    },
}

impl AdapterError {
    /// Why [`discover`] and [`discover_all`] find nothing: [`AdapterError::Backends`] or [`AdapterError::None`].
    pub fn none_discovered() -> Self {
        match std::env::var_os("WGPU_BACKEND") {
            Some(backends) if !backends.is_empty() => {
                Self::Backends { backends: backends.to_string_lossy().into_owned() }
            }
            _ => Self::None,
        }
    }
}

/// The kind of device, best first. The derived order is the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// A GPU with memory of its own.
    Discrete,
    /// A GPU that shares the processor's memory.
    Integrated,
    /// A GPU behind a hypervisor.
    Virtual,
    /// A device of which the driver does not say what it is.
    Other,
    /// A processor that plays a GPU.
    Software,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Discrete => "discrete GPU",
            Self::Integrated => "integrated GPU",
            Self::Virtual => "virtual GPU",
            Self::Other => "device of unknown kind",
            Self::Software => "software renderer",
        })
    }
}

/// The kind of an adapter.
///
/// OpenGL does not say what a device is and wgpu guesses from its name, so the known software renderers are
/// recognised by name as well, whatever kind is reported.
pub fn kind(info: &wgpu::AdapterInfo) -> Kind {
    const SOFTWARE: [&str; 6] =
        ["llvmpipe", "lavapipe", "softpipe", "swiftshader", "microsoft basic render", "software rasterizer"];
    let name = info.name.to_lowercase();
    let driver = info.driver.to_lowercase();
    if SOFTWARE.iter().any(|software| name.contains(software) || driver.contains(software)) {
        return Kind::Software;
    }
    match info.device_type {
        wgpu::DeviceType::DiscreteGpu => Kind::Discrete,
        wgpu::DeviceType::IntegratedGpu => Kind::Integrated,
        wgpu::DeviceType::VirtualGpu => Kind::Virtual,
        wgpu::DeviceType::Other => Kind::Other,
        wgpu::DeviceType::Cpu => Kind::Software,
    }
}

/// Whether the backend is one that compute was made for. OpenGL runs it too, with tighter limits.
fn is_modern(backend: wgpu::Backend) -> bool {
    !matches!(backend, wgpu::Backend::Gl | wgpu::Backend::Noop)
}

/// The indices of the usable adapters in `infos`, best first.
///
/// Discrete before integrated before virtual before unknown before software; among equals Vulkan, Metal and DX12
/// before OpenGL; then in the order given. The `noop` backend computes nothing and is left out.
pub fn rank(infos: &[wgpu::AdapterInfo]) -> Vec<usize> {
    let mut order: Vec<(Kind, Reverse<bool>, usize)> = infos
        .iter()
        .enumerate()
        .filter(|(_, info)| info.backend != wgpu::Backend::Noop)
        .map(|(index, info)| (kind(info), Reverse(is_modern(info.backend)), index))
        .collect();
    order.sort_unstable();
    order.into_iter().map(|(_, _, index)| index).collect()
}

/// One line about an adapter: name, backend, driver, kind.
pub fn describe(info: &wgpu::AdapterInfo) -> String {
    let driver = driver(info);
    let separator = if driver.is_empty() { "" } else { ", " };
    format!("{} ({}{separator}{driver}, {})", info.name, info.backend, kind(info))
}

/// Driver and its version, as far as the backend tells.
pub fn driver(info: &wgpu::AdapterInfo) -> String {
    [info.driver.trim(), info.driver_info.trim()]
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Picks from `infos`, which [`rank`] has put in order.
///
/// `None` takes the first. Otherwise `wanted` is an index into `infos` or, where it is none, a part of an
/// adapter's name, backend or driver, in upper or lower case; the first that has it wins. A number of three or more
/// digits that is no index is a name, so that `"4090"` finds the card; a shorter one is only ever an index, lest
/// `"7"` find a "780M".
///
/// # Errors
/// [`AdapterError::None`] for an empty list, [`AdapterError::NoMatch`] otherwise.
pub fn select(infos: &[wgpu::AdapterInfo], wanted: Option<&str>) -> Result<usize, AdapterError> {
    if infos.is_empty() {
        return Err(AdapterError::None);
    }
    let Some(wanted) = wanted else {
        return Ok(0);
    };
    if let Some(index) = wanted.parse().ok().filter(|index| *index < infos.len()) {
        return Ok(index);
    }
    let part = wanted.trim().to_lowercase();
    let is_index = part.len() < 3 && part.bytes().all(|byte| byte.is_ascii_digit());
    infos
        .iter()
        .position(|info| {
            !is_index
                && [info.name.as_str(), info.backend.to_str(), &driver(info)]
                    .iter()
                    .any(|text| text.to_lowercase().contains(&part))
        })
        .ok_or_else(|| AdapterError::NoMatch {
            wanted: wanted.to_owned(),
            available: infos.iter().enumerate().map(|(index, info)| format!("{index}: {}", describe(info))).collect(),
        })
}

/// The usable adapters of an instance, best first. An index into this list is what [`select`] and [`find`] take.
pub async fn list(instance: &wgpu::Instance) -> Vec<wgpu::Adapter> {
    let found = instance.enumerate_adapters(wgpu::Backends::all()).await;
    let infos: Vec<_> = found.iter().map(wgpu::Adapter::get_info).collect();
    rank(&infos).into_iter().filter_map(|index| found.get(index).cloned()).collect()
}

/// The best adapter of an instance, or the one that is asked for by index or name (see [`select`]).
///
/// # Errors
/// As [`select`].
pub async fn find(instance: &wgpu::Instance, wanted: Option<&str>) -> Result<wgpu::Adapter, AdapterError> {
    let adapters = list(instance).await;
    let infos: Vec<_> = adapters.iter().map(wgpu::Adapter::get_info).collect();
    let index = select(&infos, wanted)?;
    adapters.into_iter().nth(index).ok_or(AdapterError::None)
}

/// This machine's adapters, best first, without an instance at hand. `WGPU_BACKEND` limits them.
pub async fn discover_all() -> Vec<wgpu::Adapter> {
    list(&instance()).await
}

/// The adapter to use, without an instance at hand. `WGPU_BACKEND` limits the choice.
///
/// # Errors
/// As [`select`]; [`AdapterError::Backends`] where `WGPU_BACKEND` leaves none.
pub async fn discover(wanted: Option<&str>) -> Result<wgpu::Adapter, AdapterError> {
    match find(&instance(), wanted).await {
        Err(AdapterError::None) => Err(AdapterError::none_discovered()),
        found => found,
    }
}

fn instance() -> wgpu::Instance {
    wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env())
}

#[cfg(test)]
mod tests {
    use wgpu::{AdapterInfo, Backend, DeviceType};

    use super::*;

    fn info(name: &str, kind: DeviceType, backend: Backend) -> AdapterInfo {
        AdapterInfo { name: name.into(), driver: "drv".into(), ..AdapterInfo::new(kind, backend) }
    }

    fn machine() -> Vec<AdapterInfo> {
        let listed = [
            info("llvmpipe (LLVM 15.0.6, 256 bits)", DeviceType::Cpu, Backend::Vulkan),
            info("AMD Radeon 780M", DeviceType::IntegratedGpu, Backend::Gl),
            info("NVIDIA GeForce RTX 4090/PCIe", DeviceType::DiscreteGpu, Backend::Gl),
            info("AMD Radeon 780M", DeviceType::IntegratedGpu, Backend::Vulkan),
            info("noop wgpu backend", DeviceType::DiscreteGpu, Backend::Noop),
            info("Mystery", DeviceType::Other, Backend::Vulkan),
            info("NVIDIA GeForce RTX 4090", DeviceType::DiscreteGpu, Backend::Vulkan),
            info("virtio", DeviceType::VirtualGpu, Backend::Vulkan),
        ];
        rank(&listed).into_iter().map(|index| listed[index].clone()).collect()
    }

    #[test]
    fn best_first_and_never_noop() {
        let order: Vec<_> = machine().iter().map(|info| (info.name.clone(), info.backend)).collect();
        let names: Vec<_> = order.iter().map(|(name, backend)| (name.as_str(), *backend)).collect();
        assert_eq!(
            names,
            [
                ("NVIDIA GeForce RTX 4090", Backend::Vulkan),
                ("NVIDIA GeForce RTX 4090/PCIe", Backend::Gl),
                ("AMD Radeon 780M", Backend::Vulkan),
                ("AMD Radeon 780M", Backend::Gl),
                ("virtio", Backend::Vulkan),
                ("Mystery", Backend::Vulkan),
                ("llvmpipe (LLVM 15.0.6, 256 bits)", Backend::Vulkan),
            ]
        );
    }

    #[test]
    fn every_pair_of_kinds_and_backends_ranks_as_stated() {
        let kinds = [
            DeviceType::DiscreteGpu,
            DeviceType::IntegratedGpu,
            DeviceType::VirtualGpu,
            DeviceType::Other,
            DeviceType::Cpu,
        ];
        let backends = [Backend::Vulkan, Backend::Metal, Backend::Dx12, Backend::BrowserWebGpu, Backend::Gl];
        let all: Vec<_> =
            kinds.iter().enumerate().flat_map(|(k, kind)| backends.map(|backend| (k, *kind, backend))).collect();
        for (k_a, kind_a, backend_a) in &all {
            for (k_b, kind_b, backend_b) in &all {
                let pair = [info("a", *kind_a, *backend_a), info("b", *kind_b, *backend_b)];
                let b_wins = k_b < k_a || (k_b == k_a && *backend_a == Backend::Gl && *backend_b != Backend::Gl);
                assert_eq!(rank(&pair), if b_wins { [1, 0] } else { [0, 1] }, "{pair:?}");
            }
        }
    }

    #[test]
    fn a_software_renderer_is_known_by_name() {
        for name in ["llvmpipe (LLVM 20)", "SwiftShader Device", "Microsoft Basic Render Driver", "softpipe"] {
            let disguised = info(name, DeviceType::DiscreteGpu, Backend::Vulkan);
            let real = info("Mystery", DeviceType::Other, Backend::Gl);
            assert_eq!(kind(&disguised), Kind::Software, "{name}");
            assert_eq!(rank(&[disguised, real]), [1, 0], "{name}");
        }
    }

    #[test]
    fn selection() {
        let machine = machine();
        let pick = |wanted| select(&machine, wanted);
        assert_eq!(pick(None), Ok(0));
        assert_eq!(pick(Some("0")), Ok(0));
        assert_eq!(pick(Some("6")), Ok(6));
        assert_eq!(pick(Some("RADEON")), Ok(2), "ambiguous: the best of the matches");
        assert_eq!(pick(Some("gl")), Ok(1), "a backend");
        assert_eq!(pick(Some("4090")), Ok(0), "a number that is no index is a name");
        assert_eq!(pick(Some("drv")), Ok(0), "a driver");
        for wanted in ["7", "arc", "", " "] {
            let Err(AdapterError::NoMatch { available, .. }) = pick(Some(wanted)) else {
                panic!("{wanted:?} was accepted");
            };
            assert_eq!(available.len(), machine.len(), "{wanted:?}");
        }
    }

    #[test]
    fn none_says_what_to_install() {
        let error = select(&[], Some("0")).unwrap_err();
        assert_eq!(error, AdapterError::None);
        assert!(error.to_string().contains("mesa-vulkan-drivers"), "{error}");
        assert_eq!(rank(&[info("noop", DeviceType::Other, Backend::Noop)]), [0_usize; 0]);
    }

    #[test]
    fn no_match_lists_what_there_is() {
        let text = select(&machine(), Some("arc")).unwrap_err().to_string();
        assert!(
            text.contains("\"arc\"") && text.contains("6: llvmpipe") && text.contains("software renderer"),
            "{text}"
        );
    }
}
