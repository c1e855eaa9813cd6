//! A case file: safetensors in, a validated [`Case`] out.

use std::path::Path;

use paged_attention::{
    AttentionOptions, Case, CaseExtras, Dtype, HEAD_DIM_MAX, HeadGeometry, KvSource, PageSize, Tensor, V_HEAD_DIM_MAX,
};
use safetensors::tensor::TensorView;
use safetensors::{SafeTensorError, SafeTensors};

use crate::args::{PagingFlags, SettingFlags};
use crate::error::InputError;
use crate::{header, index, inputs, settings};

/// The tensors of a contiguous cache; `k` and `v` mark it.
const CONTIGUOUS: [&str; 3] = ["k", "v", "kv_indptr"];
/// The tensors of a paged cache; `k_pages` and `v_pages` mark it.
const PAGED: [&str; 5] = ["k_pages", "v_pages", "page_indptr", "page_ids", "kv_len"];
/// Tensors that change scores.
const EXTRAS: [&str; 4] = ["alibi_slopes", "sinks", "mask", "bias"];

/// Heads beyond which a shape is taken for a mistake. A tensor without rows costs its author nothing, while the
/// reference keeps figures per head.
const HEADS_MAX: u32 = 1 << 16;

const FLOATS: &str = "F32, F16 or BF16";

/// A case and what is worth a warning.
#[derive(Debug)]
pub struct Loaded {
    /// The case.
    pub case: Case,
    /// Names of tensors that mean nothing here.
    pub unknown: Vec<String>,
    /// Size of the file.
    pub bytes: u64,
}

/// Reads a case and checks all of it.
pub fn load(path: &Path, flags: &SettingFlags, paging: &PagingFlags) -> Result<Loaded, InputError> {
    let bytes = inputs::read(path)?;
    parse(&bytes, flags, paging)
}

/// [`load`] from memory.
pub fn parse(bytes: &[u8], flags: &SettingFlags, paging: &PagingFlags) -> Result<Loaded, InputError> {
    let file = header::open(bytes)?;
    let tensors = Tensors(&file.tensors);
    let settings = settings::resolve(flags, &file.metadata)?;
    let is_paged = tensors.is_paged()?;
    check_paging(is_paged, paging)?;

    let q = tensors.floats("q", "[total_q, q_heads, head_dim]", 3)?;
    let (k_name, v_name, shape) = if is_paged {
        ("k_pages", "v_pages", "[pages, page_size, kv_heads, dim]")
    } else {
        ("k", "v", "[total_kv, kv_heads, dim]")
    };
    let rank = if is_paged { 4 } else { 3 };
    let k = tensors.floats(k_name, shape, rank)?;
    let v = tensors.floats(v_name, shape, rank)?;
    let geometry = geometry(&q, (k_name, &k), (v_name, &v))?;

    let mut options = AttentionOptions::new(&geometry)
        .with_causal(settings.causal)
        .with_window(settings.window_left, settings.window_right)
        .with_softcap(settings.softcap);
    if let Some(scale) = settings.scale {
        options = options.with_scale(scale);
    }
    let total_q = q.shape().first().copied().unwrap_or(0);
    let (q_indptr, kv) = if is_paged {
        let page_size = k.shape().get(1).copied().unwrap_or(0);
        u32::try_from(page_size)
            .map_err(|_| ())
            .and_then(|tokens| PageSize::new(tokens).map_err(|_| ()))
            .map_err(|()| shape_error(k_name, &k, format!("a page_size from 1 to {} is needed", u32::MAX)))?;
        let kv_len = tensors.index_needed("kv_len", "a paged case states each sequence's length")?;
        let kv = KvSource::Paged {
            k_pages: k,
            v_pages: v,
            page_indptr: tensors.index_needed("page_indptr", "a paged case has a page table")?,
            page_ids: tensors.index_needed("page_ids", "a paged case has a page table")?,
            kv_len: kv_len.clone(),
        };
        (tensors.indptr("q_indptr", total_q, ("kv_len", kv_len.len()))?, kv)
    } else {
        let total_kv = k.shape().first().copied().unwrap_or(0);
        let seqs = |indptr: Option<Vec<u32>>| indptr.map_or(1, |indptr| indptr.len().saturating_sub(1));
        let (q_seqs, kv_seqs) = (seqs(tensors.index("q_indptr")?), seqs(tensors.index("kv_indptr")?));
        let q_indptr = tensors.indptr("q_indptr", total_q, ("kv_indptr", kv_seqs))?;
        let kv_indptr = tensors.indptr("kv_indptr", total_kv, ("q_indptr", q_seqs))?;
        (q_indptr, KvSource::Contiguous { k, v, kv_indptr })
    };
    let case = Case::new(geometry, options, q, q_indptr, kv)?;
    // A case without extras has passed its checks.
    let extras = tensors.extras()?;
    let case = if extras.is_empty() { case } else { case.with_extras(extras)? };
    Ok(Loaded { case, unknown: tensors.unknown(), bytes: bytes.len() as u64 })
}

/// Flags that only a contiguous case can obey, or only a paged one.
fn check_paging(is_paged: bool, paging: &PagingFlags) -> Result<(), InputError> {
    let (paged, packed) = ("the file is paged already (`k_pages`, `v_pages`)", "the file has no pages (`k`, `v`)");
    let given = [
        ("--page-size", is_paged && paging.page_size.is_some(), paged),
        ("--shuffle-pages", is_paged && paging.shuffle_pages.is_some(), paged),
        ("--share-prefixes", !is_paged && paging.share_prefixes.is_some(), packed),
    ];
    match given.into_iter().find(|(_, refused, _)| *refused) {
        Some((flag, _, why)) => Err(InputError::Flag { flag, why: why.into() }),
        None => Ok(()),
    }
}

/// Heads and dimensions out of the shapes, with the tensor named that has an unusable one.
fn geometry(
    q: &Tensor,
    (k_name, k): (&'static str, &Tensor),
    (v_name, v): (&'static str, &Tensor),
) -> Result<HeadGeometry, InputError> {
    let [q_heads, head_dim] = last_two("q", q)?;
    let [kv_heads, _] = last_two(k_name, k)?;
    let [_, v_head_dim] = last_two(v_name, v)?;
    for (name, tensor, heads) in [("q", q, q_heads), (k_name, k, kv_heads)] {
        if heads > HEADS_MAX {
            return Err(shape_error(name, tensor, format!("at most {HEADS_MAX} heads are supported")));
        }
    }
    for (name, tensor, dim, limit) in [("q", q, head_dim, HEAD_DIM_MAX), (v_name, v, v_head_dim, V_HEAD_DIM_MAX)] {
        if dim > limit {
            return Err(shape_error(name, tensor, format!("a head dimension over {limit} is not supported")));
        }
    }
    HeadGeometry::with_v_head_dim(q_heads, kv_heads, head_dim, v_head_dim).map_err(|error| {
        use paged_attention::GeometryError as E;
        let (name, tensor) = match &error {
            E::ZeroHeads { name: "kv_heads" } => (k_name, k),
            E::HeadDim { name: "v_head_dim", .. } => (v_name, v),
            _ => ("q", q),
        };
        match error {
            E::HeadRatio { .. } => {
                let axes = if k.shape().len() == 3 { "[rows, heads, dim]" } else { "[pages, page_size, heads, dim]" };
                let needed = format!(
                    "{error}, which `{k_name}` has by its shape {:?}; are the axes in order? `q` is [rows, heads, dim], \
                     `{k_name}` is {axes}, and [heads, rows, dim] must be transposed",
                    k.shape()
                );
                shape_error(name, tensor, needed)
            }
            error => shape_error(name, tensor, error.to_string()),
        }
    })
}

fn last_two(name: &'static str, tensor: &Tensor) -> Result<[u32; 2], InputError> {
    // A tensor without elements may have any other dimension, so each is checked.
    let dims: Option<Vec<u32>> = tensor.shape().iter().map(|dim| u32::try_from(*dim).ok()).collect();
    match dims.as_deref() {
        Some([.., heads, dim]) => Ok([*heads, *dim]),
        _ => Err(shape_error(name, tensor, format!("dimensions up to {} are supported", u32::MAX))),
    }
}

fn shape_error(tensor: &'static str, found: &Tensor, needed: String) -> InputError {
    InputError::Shape { tensor, found: found.shape().to_vec(), needed }
}

/// What to do with the batches of other libraries.
fn packing_hint(name: &str, needed: usize, found: usize) -> String {
    if (needed, found) != (3, 4) {
        return String::new();
    }
    let indptr = if name == "q" { "q_indptr" } else { "kv_indptr" };
    format!(
        "; sequences are packed one after the other: [batch, rows, heads, dim] becomes [batch * rows, heads, dim], and \
         `{indptr}` says where each starts"
    )
}

/// The tensors of one file, by name.
struct Tensors<'a>(&'a SafeTensors<'a>);

impl<'a> Tensors<'a> {
    fn get(&self, name: &str) -> Option<TensorView<'a>> {
        match self.0.tensor(name) {
            Ok(view) => Some(view),
            Err(SafeTensorError::TensorNotFound(_)) => None,
            // `tensor` has no other error.
            Err(_) => None,
        }
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// Names that mean nothing here, sorted.
    fn unknown(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .0
            .names()
            .into_iter()
            .filter(|name| {
                ![&["q", "q_indptr"][..], &CONTIGUOUS, &PAGED, &EXTRAS].iter().any(|known| known.contains(name))
            })
            .map(str::to_owned)
            .collect();
        names.sort_unstable();
        names
    }

    /// Names beside those known, for a message that one of those is missing.
    fn others(&self) -> String {
        const NAMED_MAX: usize = 8;
        let unknown = self.unknown();
        if unknown.is_empty() {
            return String::new();
        }
        let named: Vec<String> = unknown.iter().take(NAMED_MAX).map(|name| format!("`{name}`")).collect();
        let more = match unknown.len().saturating_sub(NAMED_MAX) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!("; the file has {}{more}, which mean nothing here", named.join(", "))
    }

    /// Whether the cache is paged. Tensors of both kinds are refused: one of them would be ignored.
    fn is_paged(&self) -> Result<bool, InputError> {
        let first = |names: &[&'static str]| names.iter().copied().find(|name| self.has(name));
        match (first(&CONTIGUOUS), first(&PAGED)) {
            (Some(other), Some(tensor)) => Err(InputError::Conflict {
                tensor,
                other,
                why: "keys and values are either contiguous (`k`, `v`, `kv_indptr`) or paged (`k_pages`, `v_pages`, \
                      `page_indptr`, `page_ids`, `kv_len`)",
            }),
            (None, None) => Err(InputError::Missing {
                tensor: "k",
                why: format!(
                    "keys and values are needed, contiguous (`k`, `v`) or paged (`k_pages`, `v_pages`){}",
                    self.others()
                ),
            }),
            (_, paged) => Ok(paged.is_some()),
        }
    }

    fn needed(&self, name: &'static str, why: &str) -> Result<TensorView<'a>, InputError> {
        self.get(name).ok_or_else(|| InputError::Missing { tensor: name, why: why.to_owned() })
    }

    fn floats(&self, name: &'static str, shape: &str, rank: usize) -> Result<Tensor, InputError> {
        let view = self.needed(name, &format!("it is needed, of shape {shape} and type {FLOATS}{}", self.others()))?;
        let types = [safetensors::Dtype::F32, safetensors::Dtype::F16, safetensors::Dtype::BF16];
        read_floats(name, &view, (shape, rank), (&types, FLOATS))
    }

    /// Slopes, sinks, mask and bias, as far as the file has them.
    fn extras(&self) -> Result<CaseExtras, InputError> {
        use safetensors::Dtype::{F16, F32};
        let of_heads = |name| {
            let read = |view| read_floats(name, &view, ("[q_heads]", 1), (&[F32], "F32"));
            self.get(name).map(read).transpose().map(|tensor| tensor.map(|tensor| tensor.to_f32()))
        };
        let shape = ("[1 or q_heads, sum of q_len * kv_len]", 2);
        let bias = self.get("bias").map(|view| read_floats("bias", &view, shape, (&[F32, F16], "F32 or F16")));
        let mut extras = CaseExtras::default();
        extras.alibi_slopes = of_heads("alibi_slopes")?;
        extras.sinks = of_heads("sinks")?;
        extras.mask = self.get("mask").map(|view| read_mask("mask", &view)).transpose()?;
        extras.bias = bias.transpose()?;
        Ok(extras)
    }

    fn index(&self, name: &'static str) -> Result<Option<Vec<u32>>, InputError> {
        self.get(name).map(|view| index::read(name, &view)).transpose()
    }

    fn index_needed(&self, name: &'static str, why: &str) -> Result<Vec<u32>, InputError> {
        index::read(name, &self.needed(name, why)?)
    }

    /// An indptr that may be left out where there is one sequence; `other` says how many another tensor has.
    fn indptr(&self, name: &'static str, rows: usize, other: (&str, usize)) -> Result<Vec<u32>, InputError> {
        match (self.index(name)?, other) {
            (Some(indptr), _) => Ok(indptr),
            (None, (_, 1)) => u32::try_from(rows).map(|rows| vec![0, rows]).map_err(|_| InputError::Missing {
                tensor: name,
                why: format!("it stands for 0 .. {rows}, more rows than the {} that are supported", u32::MAX),
            }),
            (None, (other, seqs)) => Err(InputError::Missing {
                tensor: name,
                why: format!("it may be left out for one sequence only, and `{other}` is for {seqs}"),
            }),
        }
    }
}

/// A tensor of one of `types`, with `rank` dimensions `shape`.
fn read_floats(
    name: &'static str,
    view: &TensorView<'_>,
    (shape, rank): (&str, usize),
    (types, needed): (&[safetensors::Dtype], &'static str),
) -> Result<Tensor, InputError> {
    let dtype = match view.dtype() {
        found if !types.contains(&found) => None,
        safetensors::Dtype::F32 => Some(Dtype::F32),
        safetensors::Dtype::F16 => Some(Dtype::F16),
        safetensors::Dtype::BF16 => Some(Dtype::Bf16),
        _ => None,
    };
    let Some(dtype) = dtype else {
        return Err(InputError::Dtype { tensor: name, found: view.dtype().to_string(), needed });
    };
    check_rank(name, view, (shape, rank))?;
    Tensor::from_bytes(dtype, view.shape(), view.data().to_vec())
        .map_err(|error| InputError::Tensor { tensor: name, error })
}

/// Zeros and ones.
fn read_mask(name: &'static str, view: &TensorView<'_>) -> Result<Vec<bool>, InputError> {
    if ![safetensors::Dtype::U8, safetensors::Dtype::BOOL].contains(&view.dtype()) {
        return Err(InputError::Dtype { tensor: name, found: view.dtype().to_string(), needed: "U8 or BOOL" });
    }
    check_rank(name, view, ("[sum of q_len * kv_len]", 1))?;
    let entries = view.data().iter().enumerate();
    entries
        .map(|(index, entry)| match entry {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(InputError::MaskValue { tensor: name, index, found: *found }),
        })
        .collect()
}

fn check_rank(name: &'static str, view: &TensorView<'_>, (shape, rank): (&str, usize)) -> Result<(), InputError> {
    if view.shape().len() == rank {
        return Ok(());
    }
    let dimensions = if rank == 1 { "dimension" } else { "dimensions" };
    Err(InputError::Shape {
        tensor: name,
        found: view.shape().to_vec(),
        needed: format!("{rank} {dimensions} {shape} are needed{}", packing_hint(name, rank, view.shape().len())),
    })
}

#[cfg(test)]
mod tests {
    use paged_attention_cases::{CaseSpec, build, crossed, crossed_kernels, options, write_case};

    use super::*;

    /// A case that was written is read as the same one, options and extras included.
    #[test]
    fn written_cases_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("case.safetensors");
        let small = |spec: &CaseSpec| spec.flops() < 1e7;
        let rows = options().into_iter().filter(small).map(|spec| (build(&spec), spec));
        let drawn = (0..40).zip(crossed_kernels().into_iter().cycle()).map(|(seed, kernel)| crossed(&kernel, seed));
        let drawn = drawn.filter(|drawn| small(&drawn.spec)).map(|drawn| (drawn.build(), drawn.spec));
        for (case, spec) in rows.chain(drawn) {
            let case = case.unwrap();
            write_case(&case, &path).unwrap();
            let loaded = load(&path, &SettingFlags::default(), &PagingFlags::default()).unwrap();
            assert!(loaded.unknown.is_empty());
            // By their text: a NaN in a slot that nobody owns is the same one.
            assert_eq!(format!("{:?}", loaded.case), format!("{case:?}"), "{spec}");
        }
    }
}
