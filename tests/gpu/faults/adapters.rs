//! Fault 23, which no kernel has: the wrong adapter.

use paged_attention::{adapter, wgpu};
use wgpu::{AdapterInfo, Backend, DeviceType};

/// Adapters of one machine, from the one that must come first to the one that must come last.
fn best_to_worst() -> Vec<AdapterInfo> {
    let info = |name: &str, kind, backend| AdapterInfo { name: name.into(), ..AdapterInfo::new(kind, backend) };
    vec![
        info("NVIDIA GeForce RTX 4090", DeviceType::DiscreteGpu, Backend::Vulkan),
        info("NVIDIA GeForce RTX 4090/PCIe", DeviceType::DiscreteGpu, Backend::Gl),
        info("AMD Radeon 780M", DeviceType::IntegratedGpu, Backend::Vulkan),
        info("AMD Radeon 780M", DeviceType::IntegratedGpu, Backend::Gl),
        info("virtio", DeviceType::VirtualGpu, Backend::Vulkan),
        info("Mystery", DeviceType::Other, Backend::Vulkan),
        info("llvmpipe (LLVM 15.0.6, 256 bits)", DeviceType::Cpu, Backend::Vulkan),
        // OpenGL says that it is a GPU.
        info("llvmpipe (LLVM 15.0.6, 256 bits)", DeviceType::DiscreteGpu, Backend::Gl),
    ]
}

/// Whether `rank` puts every list of three of them in order, however it is given, and leaves none out.
fn check(rank: impl Fn(&[AdapterInfo]) -> Vec<usize>) -> Result<(), String> {
    let infos = best_to_worst();
    for a in 0..infos.len() {
        for b in a + 1..infos.len() {
            for c in b + 1..infos.len() {
                for given in [[a, b, c], [a, c, b], [b, a, c], [b, c, a], [c, a, b], [c, b, a]] {
                    let order: Vec<usize> =
                        rank(&given.map(|index| infos[index].clone())).into_iter().map(|index| given[index]).collect();
                    if order != [a, b, c] {
                        let names: Vec<String> = order.iter().map(|i| adapter::describe(&infos[*i])).collect();
                        return Err(format!("ranked as {}", names.join("; ")));
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn fault_23_the_wrong_adapter() {
    check(adapter::rank).unwrap();
    // The other way round; as listed; what OpenGL claims believed; whatever is Vulkan first.
    assert!(check(|infos| adapter::rank(infos).into_iter().rev().collect()).is_err());
    assert!(check(|infos| (0..infos.len()).collect()).is_err());
    let by_key = |infos: &[AdapterInfo], key: fn(&AdapterInfo) -> (bool, bool)| {
        let mut order = adapter::rank(infos);
        order.sort_by_key(|index| key(&infos[*index]));
        order
    };
    let claimed = |info: &AdapterInfo| (info.device_type == DeviceType::Cpu, false);
    assert!(check(|infos| by_key(infos, claimed)).is_err());
    let vulkan_first = |info: &AdapterInfo| (info.backend != Backend::Vulkan, false);
    assert!(check(|infos| by_key(infos, vulkan_first)).is_err());
    // Whoever gets a software renderer is told so.
    let software = adapter::describe(best_to_worst().last().unwrap());
    assert!(software.contains("software renderer"), "{software}");
}
