//! An option that is off adds no instruction.
//!
//! Of every option it is known which identifiers are about it alone. From the text of a kernel that is specialised with the
//! option off, everything is removed that has one of them: functions of that name, and any other line. What is left must
//! translate to the same SPIR-V, word by word. So nothing that an entry point reaches asks whether the option is on, computes
//! with its numbers, or reads its tensors. (Members of the uniform parameters stay: they are no instructions, and their
//! offsets are the host's.)

// The short forms are allowed in test functions only; here the helpers belong to them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use naga::compact::{KeepUnused, compact};
use naga::valid::{Capabilities, ValidationFlags, Validator};
use paged_attention::kernels::{AdapterFacts, KernelId, SUBGROUP_SIZES, Variants};
use paged_attention::{Dtype, HeadGeometry, KernelConfig, KvDtype, KvDtypes, Modifiers, NewRows, Pairing, RotaryShape};
use std::num::NonZeroU32;

/// An option of the kernels.
struct Switch {
    name: &'static str,
    /// Identifiers; of those that end in a number for each row or key, what comes before it.
    words: &'static [&'static str],
    turn_off: fn(&mut KernelConfig),
}

const SWITCHES: [Switch; 11] = [
    Switch {
        name: "window",
        words: &["reach_left", "first_visible", "row.begin"],
        // A shared prefix begins where its outer one ends, so its keys have a beginning too.
        turn_off: |config| (config.modifiers.window_left, config.modifiers.shared_prefixes) = (false, false),
    },
    Switch {
        name: "soft cap",
        words: &["softcap_log2", "soft_capped"],
        turn_off: |config| config.modifiers.softcap = false,
    },
    Switch { name: "ALiBi", words: &["slope_log2", "position"], turn_off: |config| config.modifiers.alibi = false },
    Switch { name: "sinks", words: &["sink"], turn_off: |config| config.modifiers.sinks = false },
    Switch {
        name: "mask",
        words: &["masks", "mask_begin", "mask_run", "Run", "run", "runs", "first_run", "tested", "stretch"],
        turn_off: |config| config.modifiers.mask = false,
    },
    Switch {
        name: "bias",
        words: &["bias", "bias_at", "bias_begin", "bias_head_stride"],
        turn_off: |config| config.modifiers.bias = None,
    },
    Switch {
        name: "shared prefixes",
        words: &["owners", "packed_row"],
        turn_off: |config| config.modifiers.shared_prefixes = false,
    },
    Switch {
        name: "scales",
        words: &[
            "k_scale",
            "v_scale",
            "k_scales",
            "v_scales",
            "scale_k",
            "scale_v",
            "inverse",
            "key_scale",
            "value_scale",
            "key_scales",
            "row_scale",
            "head_scales",
            "scales_of",
            "unpack_byte_chunk",
            "pack_int8",
            "pack_fp8",
        ],
        turn_off: |config| config.kv = Dtype::F16.into(),
    },
    Switch {
        name: "rotation",
        words: &["rotated", "rotated_chunk", "turns", "cosine", "sine", "turned", "new_element"],
        turn_off: |config| config.new_rows.rotary = None,
    },
    Switch { name: "segments", words: &["kv_pages_1"], turn_off: |config| config.segments = NonZeroU32::MIN },
    Switch {
        name: "groups of segments",
        words: &["is_here", "any_here", "first_page", "entries"],
        turn_off: |config| config.modifiers.grouped = false,
    },
];

/// What several options have in common, and nothing else.
const SHARED_WORDS: [&str; 1] = ["heads"];

/// Everything is on.
fn all_on(variants: Variants) -> KernelConfig {
    KernelConfig {
        geometry: HeadGeometry::new(8, 2, 64).unwrap(),
        q: Dtype::F32,
        kv: KvDtypes { k: KvDtype::Int8, v: KvDtype::Fp8 },
        new_rows: NewRows {
            dtype: Dtype::F32,
            rotary: Some(RotaryShape { pairing: Pairing::HalfSplit, first: 0, dims: 64 }),
        },
        out: Dtype::F32,
        modifiers: Modifiers {
            window_left: true,
            softcap: true,
            alibi: true,
            sinks: true,
            mask: true,
            bias: Some(Dtype::F32),
            shared_prefixes: true,
            grouped: true,
        },
        segments: NonZeroU32::MIN.saturating_add(1),
        variants,
    }
}

/// Variants of every kind.
fn variants() -> Vec<Variants> {
    let geometry = HeadGeometry::new(8, 2, 64).unwrap();
    let plain = [AdapterFacts::PLAIN_CPU, AdapterFacts::PLAIN_GPU];
    let sized = plain.into_iter().flat_map(|facts| SUBGROUP_SIZES.map(|size| facts.with_subgroups(size)));
    plain.into_iter().chain(sized).flat_map(|facts| Variants::candidates(&facts, &geometry)).collect()
}

/// The identifiers of a line of code.
fn identifiers(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !(c.is_alphanumeric() || c == '_'))
}

/// Whether a line has one of `words`; those with a dot are members.
fn has_one_of(line: &str, words: &[&str]) -> bool {
    let member = words.iter().any(|word| word.contains('.') && line.contains(word));
    member || identifiers(line).any(|identifier| is_one_of(identifier, words))
}

/// Whether `identifier` is one of `words`, or one of them with the number of a row or key.
fn is_one_of(identifier: &str, words: &[&str]) -> bool {
    let end = identifier.trim_end_matches(|c: char| c.is_ascii_digit() || c == '_');
    words.contains(&identifier) || words.contains(&end)
}

/// Lines of code without what has one of `words`; and the lines outside of functions of that name that are missing.
fn without(code: &str, words: &[&str]) -> (String, Vec<String>) {
    let (mut rest, mut missing) = (String::new(), Vec::new());
    let (mut in_params, mut in_function) = (false, false);
    for line in code.lines() {
        in_params |= line.starts_with("struct Params {") || line.starts_with("struct AppendParams {");
        let named = line.strip_prefix("fn ").and_then(|rest| identifiers(rest).next());
        in_function |= named.is_some_and(|name| is_one_of(name, words));
        if !in_function {
            if in_params || !has_one_of(line, words) {
                rest.push_str(line);
                rest.push('\n');
            } else {
                missing.push(line.trim().to_owned());
            }
        }
        in_params &= line != "}";
        in_function &= line != "}";
    }
    (rest, missing)
}

/// The lines of a kernel's text, comments left out.
fn code(kernel: KernelId, config: &KernelConfig) -> String {
    let wgsl = kernel.wgsl(config).unwrap();
    let lines = wgsl.lines().map(|line| line.split("//").next().unwrap_or_default().trim_end());
    lines.filter(|line| !line.is_empty()).map(|line| format!("{line}\n")).collect()
}

/// SPIR-V of all that the entry point reaches.
fn spirv(code: &str) -> Result<Vec<u32>, String> {
    let mut module = naga::front::wgsl::parse_str(code).map_err(|error| error.emit_to_string(code))?;
    compact(&mut module, KeepUnused::No);
    let capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32 | Capabilities::SUBGROUP;
    let info = Validator::new(ValidationFlags::all(), capabilities)
        .subgroup_stages(naga::valid::ShaderStages::COMPUTE)
        .subgroup_operations(naga::valid::SubgroupOperationSet::all())
        .validate(&module)
        .map_err(|error| error.emit_to_string(code))?;
    let options = naga::back::spv::Options { lang_version: (1, 3), ..naga::back::spv::Options::default() };
    naga::back::spv::write_vec(&module, &info, &options, None).map_err(|error| error.to_string())
}

/// Whether the code is what it would be if nobody had ever thought of what `words` are about.
fn check(code: &str, words: &[&str]) -> Result<(), String> {
    let (rest, missing) = without(code, words);
    match (spirv(code)?, spirv(&rest)) {
        (found, Ok(needed)) if found == needed => Ok(()),
        (found, Ok(needed)) => Err(format!("{} words of SPIR-V, not {}: {missing:?}", found.len(), needed.len())),
        (_, Err(error)) => Err(format!("{missing:?}: {error}")),
    }
}

#[test]
fn an_option_that_is_off_adds_no_instruction() {
    let mut count = 0;
    for variants in variants() {
        let on = all_on(variants);
        let mut none = on;
        none.new_rows = Dtype::F16.into();
        for switch in &SWITCHES {
            (switch.turn_off)(&mut none);
            let mut off = on;
            (switch.turn_off)(&mut off);
            let mut met = false;
            for kernel in KernelId::ALL {
                // Everything else is on.
                check(&code(kernel, &off), switch.words)
                    .unwrap_or_else(|why| panic!("{} without {}, {off}: {why}", kernel.entry_point(), switch.name));
                // The words are the right ones: with the option on they cannot be left out.
                met |= check(&code(kernel, &on), switch.words).is_err();
                count += 1;
            }
            assert!(met, "{} has no words in any kernel", switch.name);
        }
        let words: Vec<&str> = SWITCHES.iter().flat_map(|switch| switch.words).chain(&SHARED_WORDS).copied().collect();
        for kernel in KernelId::ALL {
            check(&code(kernel, &none), &words).unwrap_or_else(|why| panic!("{}: {why}", kernel.entry_point()));
            count += 1;
        }
    }
    println!("{count} kernels compared");
}

/// A branch that is always there, for each option: all are noticed.
#[test]
fn an_option_that_is_asked_for_at_run_time_is_noticed() {
    let geometry = HeadGeometry::new(8, 2, 64).unwrap();
    let mut none = all_on(Variants::base(&AdapterFacts::PLAIN_GPU, &geometry));
    SWITCHES.iter().for_each(|switch| (switch.turn_off)(&mut none));
    let value = "    var value = s;\n";
    let visible = "    var visible = key < row.end;\n";
    let masked = "    var visible = key < row.end;\n    if params.masks != 0u {\n        \
                  visible = visible && ((plan[params.masks + key / 32u] >> (key % 32u)) & 1u) != 0u;\n    }\n";
    for (name, from, to) in [
        ("window", visible, "    var visible = key < row.end && key + params.reach_left >= row.end;\n"),
        ("soft cap", value, "    var value = s;\n    value = select(value, tanh(value), params.softcap_log2 > 0.0);\n"),
        ("mask", visible, masked),
        ("bias", value, "    var value = s * f32(1u + params.bias_head_stride);\n"),
        (
            "shared prefixes",
            "    let own = seq;\n",
            "    let own = sequence(plan[params.owners] * 0u + item.sequence);\n",
        ),
        ("groups of segments", visible, "    var visible = key < row.end && key >= params.first_page;\n"),
        ("scales", value, "    var value = s * f32(1u + params.k_scales.base);\n"),
    ] {
        let switch = SWITCHES.iter().find(|switch| switch.name == name).unwrap();
        for kernel in [KernelId::Prefill, KernelId::Decode] {
            let code = code(kernel, &none);
            check(&code, switch.words).unwrap();
            assert!(code.contains(from), "{name}: {from:?} is not in {}", kernel.entry_point());
            let mutant = code.replace(from, to);
            spirv(&mutant).unwrap();
            let why = check(&mutant, switch.words).expect_err(name);
            println!("{name}, {}: {}", kernel.entry_point(), why.lines().next().unwrap_or_default());
        }
    }
}
