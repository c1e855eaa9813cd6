//! The structs that host and shaders share, compared by naga's reflection of the shaders: no field is moved on one side
//! alone.

use std::mem::{offset_of, size_of};
use std::num::NonZeroU32;

use super::{AdapterFacts, KernelConfig, KernelId, Modifiers, Variants, copy_pages_wgsl};
use crate::geometry::{Dtype, HeadGeometry};
use crate::kv::{AppendParams, CopyParams, RowLayout};
use crate::plan::{PARAMS_BYTES, Params};

/// Name, offset in bytes and size in bytes of each member, and the size of the whole.
type Layout = (Vec<(String, u32, u32)>, u32);

macro_rules! host_layout {
    ($type:ty { $($field:ident),+ $(,)? }) => {{
        let mut fields = vec![$((stringify!($field).to_owned(), offset_of!($type, $field) as u32)),+];
        fields.sort_by_key(|(_, offset)| *offset);
        let size = size_of::<$type>() as u32;
        let ends: Vec<u32> = fields.iter().skip(1).map(|(_, offset)| *offset).chain([size]).collect();
        let fields = fields.into_iter().zip(ends).map(|((name, offset), end)| (name, offset, end - offset)).collect();
        (fields, size) as Layout
    }};
}

fn shader_layout(kernel: KernelId, name: &str) -> Layout {
    let geometry = HeadGeometry::new(8, 2, 64).expect("a legal geometry");
    let (q, kv, new_rows, out) = (Dtype::F32, Dtype::F32.into(), Dtype::F32.into(), Dtype::F32);
    let variants = Variants::base(&AdapterFacts::PLAIN_GPU, &geometry);
    let source = kernel
        .wgsl(&KernelConfig {
            geometry,
            q,
            kv,
            new_rows,
            out,
            modifiers: Modifiers::NONE,
            segments: NonZeroU32::MIN,
            variants,
        })
        .expect("the kernel expands");
    layout_in(&source, name)
}

fn layout_in(source: &str, name: &str) -> Layout {
    let module = naga::front::wgsl::parse_str(source).expect("the kernel parses");
    let mut layouter = naga::proc::Layouter::default();
    layouter.update(module.to_ctx()).expect("the types have layouts");
    let (_, found) = module.types.iter().find(|(_, found)| found.name.as_deref() == Some(name)).expect("the struct");
    let naga::TypeInner::Struct { members, span } = &found.inner else { panic!("`{name}` is no struct") };
    let member = |member: &naga::StructMember| {
        (member.name.clone().unwrap_or_default(), member.offset, layouter[member.ty].size)
    };
    (members.iter().map(member).collect(), *span)
}

#[test]
fn row_layouts_agree() {
    let host = host_layout!(RowLayout { base, page_stride, head_stride, slot_stride });
    for kernel in KernelId::ALL {
        assert_eq!(shader_layout(kernel, "RowLayout"), host, "{}", kernel.entry_point());
    }
}

#[test]
fn attention_parameters_agree() {
    let host = host_layout!(Params {
        k_rows,
        v_rows,
        k_scales,
        v_scales,
        q_factor,
        softcap_log2,
        reach_left,
        reach_right,
        kv_heads,
        page_size,
        page_count,
        bias_head_stride,
        page_ids,
        masks,
        runs,
        owners,
        prefill_items,
        prefill_groups,
        decode_items,
        decode_groups,
        merge_items,
        merge_groups,
        first_group,
        first_page,
        pages,
    });
    for kernel in [KernelId::Prefill, KernelId::Decode, KernelId::Merge] {
        assert_eq!(shader_layout(kernel, "Params"), host, "{}", kernel.entry_point());
    }
    assert!(u64::from(host.1) <= PARAMS_BYTES, "{} bytes of parameters", host.1);
}

#[test]
fn append_parameters_agree() {
    let (host, size) = host_layout!(AppendParams {
        k_rows,
        v_rows,
        k_scales,
        v_scales,
        tokens,
        kv_heads,
        page_size,
        page_count,
        groups,
        k_row_vectors,
        v_row_vectors,
        turns,
    });
    let (shader, span) = shader_layout(KernelId::Append, "AppendParams");
    assert_eq!(shader, host);
    assert!(span <= size && u64::from(size) <= PARAMS_BYTES, "{span} bytes in the shader, {size} on the host");
}

#[test]
fn copy_parameters_agree() {
    let host = host_layout!(CopyParams { page_vectors, page_count, page_groups, groups });
    assert_eq!(layout_in(&copy_pages_wgsl().expect("the kernel expands"), "CopyParams"), host);
    assert!(u64::from(host.1) <= PARAMS_BYTES, "{} bytes of parameters", host.1);
}
