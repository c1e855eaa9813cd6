//! What can be said of every kernel variant without a device: naga accepts and translates it for every backend, and
//! what it declares is what the host counts on.
//!
//! `KERNEL_DIR=<folder>` keeps each variant's WGSL, SPIR-V and HLSL there, for other tools (`ci/lanes`).
//! `SPIRV_VAL=required` makes a missing `spirv-val` an error; otherwise that check is left out where there is none.

// The short forms are allowed in test functions only; here the helpers belong to them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use std::fmt::Write as _;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::{fs, thread};

use naga::back;
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use paged_attention::kernels::{
    AdapterFacts, Alternatives, KernelId, LANES, SUBGROUP_SIZES, Variants, copy_pages_wgsl,
};
use paged_attention::{Dtype, HeadGeometry, KernelConfig, KvDtype, KvDtypes, Modifiers, NewRows, Pairing, RotaryShape};

/// `(head_dim, v_head_dim)`: the smallest, the largest, odd ones, and those of well-known models.
const DIMS: [(u32, u32); 10] =
    [(1, 1), (8, 8), (32, 32), (59, 59), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)];
const GROUPS: [u32; 6] = [1, 3, 4, 8, 9, 16];
const STORED: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
const OUT: [Dtype; 2] = [Dtype::F32, Dtype::F16];

/// A kernel, and what the host counts on.
struct Variant {
    /// `None` for the kernel that depends on no configuration.
    source: Source,
    entry_point: &'static str,
    name: String,
    subgroup: u32,
    workgroup_bytes: u32,
    storage_buffers: u32,
    lanes: u32,
}

/// What it is made from.
enum Source {
    Kernel(KernelId, Box<KernelConfig>),
    CopyPages,
}

impl Variant {
    fn new(kernel: KernelId, config: KernelConfig) -> Self {
        let KernelConfig { geometry, q, kv, new_rows, out, modifiers, segments, variants } = config;
        let Modifiers { window_left, softcap, alibi, sinks, mask, bias, shared_prefixes, grouped } = modifiers;
        let modifiers: String = [
            (window_left, "-window"),
            (softcap, "-softcap"),
            (alibi, "-alibi"),
            (sinks, "-sinks"),
            (mask, "-mask"),
            (bias.is_some(), "-bias"),
            (shared_prefixes, "-shared"),
            (grouped, "-grouped"),
        ]
        .into_iter()
        .filter_map(|(on, name)| on.then_some(name))
        .collect();
        let kv = kv.to_string().replace('/', "_");
        let rotary = new_rows.rotary.map_or(String::new(), |rotary| format!("-{:?}{}", rotary.pairing, rotary.dims));
        let new = if kernel == KernelId::Append { format!("-new_{}{rotary}", new_rows.dtype) } else { String::new() };
        let segments = if segments.get() > 1 { format!("-segments{segments}") } else { String::new() };
        let name = format!(
            "{}-{}-{}-g{}-d{}-v{}-q_{q}-kv_{kv}-out_{out}{modifiers}{new}{segments}",
            kernel.entry_point(),
            variants.prefill,
            variants.decode,
            geometry.group(),
            geometry.head_dim(),
            geometry.v_head_dim()
        );
        Self {
            source: Source::Kernel(kernel, Box::new(config)),
            entry_point: kernel.entry_point(),
            name,
            subgroup: kernel.subgroup(&config),
            workgroup_bytes: kernel.workgroup_bytes(&config),
            storage_buffers: kernel.storage_buffers(&config),
            lanes: kernel.lanes(&config),
        }
    }

    /// The kernel that copies pages.
    fn copy_pages() -> Self {
        let (entry_point, name) = ("copy_pages", "copy_pages-g1-any-q_f32".into());
        let (source, storage_buffers) = (Source::CopyPages, 3);
        Self { source, entry_point, name, subgroup: 0, workgroup_bytes: 0, storage_buffers, lanes: LANES }
    }

    fn wgsl(&self) -> Result<String, String> {
        match &self.source {
            Source::Kernel(kernel, config) => kernel.wgsl(config),
            Source::CopyPages => copy_pages_wgsl(),
        }
        .map_err(|error| error.to_string())
    }
}

/// Types of queries, keys and values, and output; new rows are in the type of the pages.
fn kernels_of(geometry: HeadGeometry, (q, kv, out): (Dtype, Dtype, Dtype), variants: Variants) -> KernelConfig {
    let (kv, new_rows) = (kv.into(), kv.into());
    KernelConfig { geometry, q, kv, new_rows, out, modifiers: Modifiers::NONE, segments: NonZeroU32::MIN, variants }
}

/// Every geometry with every stored type, and every mixture of types with two geometries: one whose rows end inside a
/// chunk of 8 elements, one whose rows do not. Variants with subgroups with fewer groups and types.
fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for (head_dim, v_head_dim) in DIMS {
        for group in GROUPS {
            let geometry = HeadGeometry::with_v_head_dim(2 * group, 2, head_dim, v_head_dim).expect("a legal geometry");
            let mixed = group == 3 && matches!(head_dim, 59 | 192);
            for (q, kv) in STORED.iter().flat_map(|q| STORED.map(|kv| (*q, kv))) {
                for out in OUT {
                    let alike = q == kv && (q == Dtype::F32) == (out == Dtype::F32);
                    for variants in Variants::all(&geometry) {
                        let config = kernels_of(geometry, (q, kv, out), variants);
                        let subgroups = variants.prefill.subgroup > 0;
                        let kernels = KernelId::ALL.into_iter().filter(|kernel| {
                            if subgroups {
                                kernel.subgroup(&config) > 0 && alike && matches!(group, 1 | 4) && q != Dtype::Bf16
                            } else {
                                alike || mixed
                            }
                        });
                        all.extend(kernels.map(|kernel| Variant::new(kernel, config)));
                    }
                }
            }
        }
    }
    all.extend(alternatives());
    all.extend(modified());
    all.extend(stored());
    all.push(Variant::copy_pages());
    all.extend(segmented());
    all
}

/// Pools in several segments, in every variant: keys and values with and without scales, and both appends. WebGPU's eight
/// storage buffers leave three to the pool, or two beside numbers per head; of a pool that has more, a dispatch has so many.
fn segmented() -> Vec<Variant> {
    let plain = HeadGeometry::new(8, 2, 64).expect("a legal geometry");
    let latent = HeadGeometry::latent(16, 576, 512).expect("a legal geometry");
    let heads = Modifiers { alibi: true, ..Modifiers::NONE };
    let grouped = Modifiers { grouped: true, ..Modifiers::NONE };
    let f16 = KvDtype::F16;
    [
        (plain, KvDtypes { k: f16, v: f16 }, Modifiers::NONE, 3),
        (plain, KvDtypes { k: f16, v: f16 }, heads, 2),
        (plain, KvDtypes { k: KvDtype::Int8, v: f16 }, Modifiers::NONE, 3),
        (plain, KvDtypes { k: KvDtype::Fp8, v: KvDtype::Int8 }, Modifiers::NONE, 2),
        (latent, KvDtypes { k: f16, v: f16 }, Modifiers::NONE, 2),
        (plain, KvDtypes { k: f16, v: f16 }, grouped, 3),
        (plain, KvDtypes { k: KvDtype::Int8, v: f16 }, grouped, 1),
        (plain, KvDtypes { k: f16, v: f16 }, Modifiers { shared_prefixes: true, mask: true, ..grouped }, 1),
    ]
    .into_iter()
    .flat_map(|(geometry, kv, modifiers, segments)| {
        let segments = NonZeroU32::new(segments).expect("segments");
        let types = (Dtype::F32, Dtype::F16, Dtype::F32);
        let config = move |variants| KernelConfig { kv, modifiers, segments, ..kernels_of(geometry, types, variants) };
        Variants::all(&geometry).into_iter().map(config)
    })
    .flat_map(|config| KernelId::ALL.map(|kernel| Variant::new(kernel, config)))
    .collect()
}

/// Each modifier alone, all of them together, and latent attention, in every variant.
fn modified() -> Vec<Variant> {
    let none = Modifiers::NONE;
    let all = Modifiers {
        window_left: true,
        softcap: true,
        alibi: true,
        sinks: true,
        mask: true,
        bias: Some(Dtype::F16),
        shared_prefixes: true,
        // Of pools in segments.
        grouped: false,
    };
    let each = [
        Modifiers { window_left: true, ..none },
        Modifiers { softcap: true, ..none },
        Modifiers { alibi: true, ..none },
        Modifiers { sinks: true, ..none },
        Modifiers { mask: true, ..none },
        Modifiers { bias: Some(Dtype::F32), ..none },
        Modifiers { shared_prefixes: true, ..none },
        all,
    ];
    let plain = HeadGeometry::new(8, 2, 64).expect("a legal geometry");
    let latent = HeadGeometry::latent(16, 576, 512).expect("a legal geometry");
    let modified = each.into_iter().map(|modifiers| (plain, modifiers));
    modified
        .chain([(latent, none), (latent, all)])
        .flat_map(|(geometry, modifiers)| {
            let (q, kv, out) = (Dtype::F32, Dtype::F16, Dtype::F32);
            let config = move |variants| KernelConfig { modifiers, ..kernels_of(geometry, (q, kv, out), variants) };
            // On CPUs shared prefixes have a rule of their own.
            let cpu = AdapterFacts::PLAIN_CPU.with_subgroups(8);
            let ruled = config(Variants::base(&cpu, &geometry)).candidates(&cpu);
            Variants::all(&geometry).into_iter().chain(ruled).map(config)
        })
        .flat_map(|config| KernelId::ALL.map(|kernel| Variant::new(kernel, config)))
        .collect()
}

/// Keys and values with scales in every variant, with and without numbers per query head beside them; and every way into
/// the pages.
fn stored() -> Vec<Variant> {
    let of = |k: KvDtype, v: KvDtype| KvDtypes { k, v };
    let (int8, fp8, f16) = (KvDtype::Int8, KvDtype::Fp8, KvDtype::F16);
    let heads = Modifiers { alibi: true, ..Modifiers::NONE };
    let plain = HeadGeometry::new(8, 2, 64).expect("a legal geometry");
    let ragged = HeadGeometry::with_v_head_dim(3, 3, 21, 59).expect("a legal geometry");
    let latent = HeadGeometry::latent(16, 576, 512).expect("a legal geometry");
    let types = (Dtype::F32, Dtype::F32, Dtype::F32);
    let mut all = Vec::new();
    for (geometry, kv, modifiers) in [
        (plain, of(int8, int8), Modifiers::NONE),
        (plain, of(fp8, fp8), Modifiers::NONE),
        (plain, of(int8, f16), Modifiers::NONE),
        (plain, of(f16, fp8), heads),
        (ragged, of(fp8, int8), heads),
        (latent, of(int8, int8), Modifiers::NONE),
        (latent, of(fp8, fp8), Modifiers::NONE),
    ] {
        for variants in Variants::all(&geometry) {
            let config = KernelConfig { kv, modifiers, ..kernels_of(geometry, types, variants) };
            let kernels = [KernelId::Prefill, KernelId::Decode, KernelId::Merge];
            all.extend(kernels.map(|kernel| Variant::new(kernel, config)));
        }
    }
    for (geometry, first) in [(plain, 0), (ragged, 3), (latent, 512)] {
        let variants = Variants::base(&AdapterFacts::PLAIN_GPU, &geometry);
        let pairs = KvDtype::ALL.iter().flat_map(|k| KvDtype::ALL.map(|v| (*k, v)));
        for (k, v) in pairs.filter(|(k, v)| k == v || !geometry.is_latent()) {
            for dtype in STORED {
                let rotary = [Pairing::Interleaved, Pairing::HalfSplit]
                    .map(|pairing| Some(RotaryShape { pairing, first, dims: 18 }));
                // Rotations, which are of keys, with every type of them.
                for rotary in [None].into_iter().chain(rotary.into_iter().filter(|_| k == v)) {
                    let (kv, new_rows) = (of(k, v), NewRows { dtype, rotary });
                    let config = KernelConfig { kv, new_rows, ..kernels_of(geometry, types, variants) };
                    all.push(Variant::new(KernelId::Append, config));
                }
            }
        }
    }
    all
}

/// What a caller can have beside the rule's choice: the variants that tuning tries, and those that compile quickly.
fn alternatives() -> Vec<Variant> {
    let mut all = Vec::new();
    for (head_dim, v_head_dim) in [(59, 59), (64, 64)] {
        let geometry = HeadGeometry::with_v_head_dim(6, 2, head_dim, v_head_dim).expect("a legal geometry");
        let sized = |facts: AdapterFacts| SUBGROUP_SIZES.map(|size| facts.with_subgroups(size));
        let plain = [AdapterFacts::PLAIN_GPU, AdapterFacts::PLAIN_CPU];
        for facts in plain.into_iter().chain(plain.into_iter().flat_map(sized)) {
            let rule = *Variants::candidates(&facts, &geometry).first().expect("there is a base");
            let quick = Variants::quick(&facts, &geometry);
            let Alternatives { mut prefill, mut decode } = Alternatives::new(&rule, &facts, &geometry);
            prefill.push(quick.prefill);
            decode.push(quick.decode);
            let prefill = prefill.into_iter().map(|prefill| (KernelId::Prefill, Variants { prefill, ..rule }));
            let decode = decode.into_iter().map(|decode| (KernelId::Decode, Variants { decode, ..rule }));
            let (q, kv, out) = (Dtype::F32, Dtype::F32, Dtype::F32);
            let config = |variants| kernels_of(geometry, (q, kv, out), variants);
            all.extend(prefill.chain(decode).map(|(kernel, variants)| Variant::new(kernel, config(variants))));
        }
    }
    all
}

/// Runs `check` on every variant, over all cores, and reports all failures together.
fn check_all(check: impl Fn(&Variant) -> Result<(), String> + Sync) {
    let variants = variants();
    let failures = Mutex::new(Vec::new());
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for offset in 0..threads {
            let (variants, failures, check) = (&variants, &failures, &check);
            scope.spawn(move || {
                for variant in variants.iter().skip(offset).step_by(threads) {
                    if let Err(message) = check(variant) {
                        failures.lock().unwrap().push(format!("{}: {message}", variant.name));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} of {} variants failed:\n{}", failures.len(), variants.len(), failures.join("\n"));
}

/// As wgpu does it: every index is checked.
const BOUNDS: naga::proc::BoundsCheckPolicies = naga::proc::BoundsCheckPolicies {
    index: naga::proc::BoundsCheckPolicy::Restrict,
    buffer: naga::proc::BoundsCheckPolicy::Restrict,
    image_load: naga::proc::BoundsCheckPolicy::Restrict,
    binding_array: naga::proc::BoundsCheckPolicy::Restrict,
};

fn spirv(module: &naga::Module, info: &ModuleInfo) -> Result<Vec<u8>, String> {
    let options =
        back::spv::Options { lang_version: (1, 3), bounds_check_policies: BOUNDS, ..back::spv::Options::default() };
    let words = back::spv::write_vec(module, info, &options, None).map_err(|error| format!("SPIR-V: {error}"))?;
    Ok(words.iter().flat_map(|word| word.to_le_bytes()).collect())
}

fn msl(module: &naga::Module, info: &ModuleInfo) -> Result<(), String> {
    let options =
        back::msl::Options { lang_version: (2, 3), bounds_check_policies: BOUNDS, ..back::msl::Options::default() };
    let (_, translation) = back::msl::write_string(module, info, &options, &back::msl::PipelineOptions::default())
        .map_err(|error| format!("MSL: {error}"))?;
    match translation.entry_point_names.into_iter().find_map(Result::err) {
        Some(error) => Err(format!("MSL: {error}")),
        None => Ok(()),
    }
}

/// HLSL as wgpu's DX12 backend asks for it. The first line says what DXC is to compile: `// cs_6_0 entry_point`.
fn hlsl(module: &naga::Module, info: &ModuleInfo, shader_model: back::hlsl::ShaderModel) -> Result<String, String> {
    let options = back::hlsl::Options {
        shader_model,
        // The number of workgroups is no builtin of HLSL; wgpu binds it.
        special_constants_binding: Some(back::hlsl::BindTarget { space: 1, ..back::hlsl::BindTarget::default() }),
        ..back::hlsl::Options::default()
    };
    let pipeline = back::hlsl::PipelineOptions { entry_point: None };
    let mut text = String::new();
    let reflection = back::hlsl::Writer::new(&mut text, &options, &pipeline)
        .write(module, info, None)
        .map_err(|error| format!("HLSL {shader_model:?}: {error}"))?;
    match reflection.entry_point_names.as_slice() {
        [Ok(entry_point)] => Ok(format!("// cs_{} {entry_point}\n{text}", shader_model.to_str())),
        [Err(error)] => Err(format!("HLSL {shader_model:?}: {error}")),
        names => Err(format!("HLSL {shader_model:?}: {} entry points", names.len())),
    }
}

fn glsl(module: &naga::Module, info: &ModuleInfo, entry_point: &str) -> Result<(), String> {
    for version in [back::glsl::Version::new_gles(310), back::glsl::Version::Desktop(430)] {
        let options = back::glsl::Options { version, ..back::glsl::Options::default() };
        let pipeline = back::glsl::PipelineOptions {
            shader_stage: naga::ShaderStage::Compute,
            entry_point: entry_point.to_owned(),
            multiview: None,
        };
        let mut text = String::new();
        back::glsl::Writer::new(&mut text, module, info, &options, &pipeline, BOUNDS)
            .and_then(|mut writer| writer.write())
            .map_err(|error| format!("GLSL {version}: {error}"))?;
    }
    Ok(())
}

/// Whether `spirv-val` is to be run.
fn spirv_val_is_there() -> bool {
    let found = Command::new("spirv-val").arg("--version").stdout(Stdio::null()).status().is_ok_and(|s| s.success());
    let required = std::env::var("SPIRV_VAL").is_ok_and(|value| value == "required");
    assert!(found || !required, "SPIRV_VAL=required, and there is no spirv-val");
    if !found {
        println!("there is no spirv-val: SPIR-V was written and not validated");
    }
    found
}

fn spirv_val(file: &Path) -> Result<(), String> {
    let output = Command::new("spirv-val")
        .args(["--target-env", "vulkan1.1"])
        .arg(file)
        .output()
        .map_err(|error| format!("spirv-val: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("spirv-val: {}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn every_variant_translates_for_every_backend() {
    let folder = std::env::var_os("KERNEL_DIR")
        .map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels"), PathBuf::from);
    fs::create_dir_all(&folder).expect("the folder can be made");
    let validate_spirv = spirv_val_is_there();
    check_all(|variant| {
        let source = variant.wgsl()?;
        let subgroups = variant.subgroup > 0;
        // Browsers want the directive; naga does not know it.
        let text = if subgroups { format!("enable subgroups;\n{source}") } else { source.clone() };
        fs::write(folder.join(format!("{}.wgsl", variant.name)), text).map_err(|error| error.to_string())?;
        let module = naga::front::wgsl::parse_str(&source).map_err(|error| error.emit_to_string(&source))?;
        // No optional feature but subgroups; the packing functions of f16 are part of WebGPU itself.
        let capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
        let capabilities = if subgroups { capabilities | Capabilities::SUBGROUP } else { capabilities };
        let info = Validator::new(ValidationFlags::all(), capabilities)
            .subgroup_stages(naga::valid::ShaderStages::COMPUTE)
            .subgroup_operations(naga::valid::SubgroupOperationSet::all())
            .validate(&module)
            .map_err(|error| error.emit_to_string(&source))?;
        let spirv_file = folder.join(format!("{}.spv", variant.name));
        fs::write(&spirv_file, spirv(&module, &info)?).map_err(|error| error.to_string())?;
        if validate_spirv {
            spirv_val(&spirv_file)?;
        }
        msl(&module, &info)?;
        let model = if subgroups { back::hlsl::ShaderModel::V6_2 } else { back::hlsl::ShaderModel::V6_0 };
        fs::write(folder.join(format!("{}.hlsl", variant.name)), hlsl(&module, &info, model)?)
            .map_err(|error| error.to_string())?;
        if subgroups {
            // Shader model 5.1 has no wave operations, and naga writes them for no GLSL that wgpu uses.
            return Ok(());
        }
        hlsl(&module, &info, back::hlsl::ShaderModel::V5_1)?;
        glsl(&module, &info, variant.entry_point)
    });
}

/// A wrong count on the host would let a kernel through that a device then refuses or, worse, runs.
#[test]
fn declared_resources_are_those_the_host_checks() {
    let limits = wgpu::Limits::default();
    check_all(|variant| {
        let source = variant.wgsl()?;
        let module = naga::front::wgsl::parse_str(&source).map_err(|error| error.emit_to_string(&source))?;
        let mut layouter = naga::proc::Layouter::default();
        layouter.update(module.to_ctx()).map_err(|error| error.to_string())?;
        let (mut workgroup_bytes, mut storage_buffers, mut uniform_buffers) = (0, 0, 0);
        for (_, global) in module.global_variables.iter() {
            match global.space {
                naga::AddressSpace::WorkGroup => {
                    // Each variable starts at a multiple of 16 bytes, as WebGPU counts it.
                    workgroup_bytes += layouter[global.ty].size.next_multiple_of(16);
                }
                naga::AddressSpace::Storage { .. } => storage_buffers += 1,
                naga::AddressSpace::Uniform => uniform_buffers += 1,
                _ => {}
            }
        }
        let [entry_point] = module.entry_points.as_slice() else {
            return Err(format!("{} entry points", module.entry_points.len()));
        };
        let mut wrong = String::new();
        let mut expect = |what: &str, found: u32, needed: u32, limit: u32| {
            if found != needed || found > limit {
                let _ = write!(wrong, "{what}: {found} declared, {needed} on the host, at most {limit}; ");
            }
        };
        expect("workgroup bytes", workgroup_bytes, variant.workgroup_bytes, limits.max_compute_workgroup_storage_size);
        expect(
            "storage buffers",
            storage_buffers,
            variant.storage_buffers,
            limits.max_storage_buffers_per_shader_stage,
        );
        expect("uniform buffers", uniform_buffers, 1, limits.max_uniform_buffers_per_shader_stage);
        let invocations = entry_point.workgroup_size.iter().product();
        expect("invocations", invocations, variant.lanes, limits.max_compute_invocations_per_workgroup);
        if entry_point.name != variant.entry_point {
            let _ = write!(wrong, "entry point `{}`", entry_point.name);
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    });
}

/// No shader file lies about unused, where no lane would look at it.
#[test]
fn every_shader_file_is_part_of_a_kernel_and_begins_with_its_purpose() {
    let geometry = HeadGeometry::new(8, 2, 64).expect("a legal geometry");
    let (q, kv, out) = (Dtype::F32, Dtype::F32, Dtype::F32);
    let variants = Variants::base(&AdapterFacts::PLAIN_GPU, &geometry);
    let config = kernels_of(geometry, (q, kv, out), variants);
    // An append that converts is another file.
    let converts = KernelConfig { kv: KvDtype::Int8.into(), ..config };
    let kernels = [config, converts].into_iter().flat_map(|config| KernelId::ALL.map(|kernel| (kernel, config)));
    let sources = kernels.map(|(kernel, config)| kernel.wgsl(&config).expect("the kernel expands"));
    let sources: Vec<String> = sources.chain([copy_pages_wgsl().expect("the kernel expands")]).collect();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders");
    let mut files = 0;
    for folder in [root.clone(), root.join("lib")] {
        for entry in fs::read_dir(folder).expect("the folder is there") {
            let path = entry.expect("the folder can be read").path();
            if path.is_dir() {
                continue;
            }
            let text = fs::read_to_string(&path).expect("shaders are text");
            // The rest may be repeated lines.
            let header: String =
                text.lines().take_while(|line| line.starts_with("//")).map(|l| l.to_owned() + "\n").collect();
            assert!(!header.is_empty(), "{} has no header comment", path.display());
            assert!(sources.iter().any(|source| source.contains(&header)), "{} is in no kernel", path.display());
            files += 1;
        }
    }
    assert!(files > KernelId::ALL.len(), "{files} shader files found");
}
