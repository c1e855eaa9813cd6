//! Opens a safetensors file and, where the `safetensors` crate refuses it, says in which tensor the fault lies.

use std::collections::{HashMap, HashSet};
use std::fmt;

use safetensors::tensor::TensorInfo;
use safetensors::{SafeTensorError, SafeTensors};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::InputError;

/// Bytes before the header, which give its length.
const PREFIX_BYTES: usize = 8;

/// A file's tensors and its metadata strings.
pub struct File<'a> {
    /// The tensors.
    pub tensors: SafeTensors<'a>,
    /// The strings under `__metadata__`.
    pub metadata: HashMap<String, String>,
}

/// Checks the header and that the tensors fill the file without gap or overlap.
pub fn open(bytes: &[u8]) -> Result<File<'_>, InputError> {
    let parse = || -> Result<File<'_>, SafeTensorError> {
        let (_, metadata) = SafeTensors::read_metadata(bytes)?;
        Ok(File {
            tensors: SafeTensors::deserialize(bytes)?,
            metadata: metadata.metadata().clone().unwrap_or_default(),
        })
    };
    let file = parse().map_err(|error| InputError::Header(explain(bytes, &error)))?;
    // The crate takes the last of two entries with one name, another reader may take the first.
    match header_text(bytes).and_then(duplicate) {
        Some(twice) => Err(InputError::Header(twice)),
        None => Ok(file),
    }
}

fn header_len(bytes: &[u8]) -> Option<u64> {
    bytes.first_chunk::<PREFIX_BYTES>().map(|prefix| u64::from_le_bytes(*prefix))
}

fn header_text(bytes: &[u8]) -> Option<&str> {
    let len = usize::try_from(header_len(bytes)?).ok()?;
    std::str::from_utf8(bytes.get(PREFIX_BYTES..PREFIX_BYTES.checked_add(len)?)?).ok()
}

/// Words for the crate's verdict, with the tensor and the numbers that the crate leaves out.
fn explain(bytes: &[u8], error: &SafeTensorError) -> String {
    match error {
        SafeTensorError::HeaderTooSmall => {
            format!("it has {} bytes; {PREFIX_BYTES} that give the header's length are needed", bytes.len())
        }
        SafeTensorError::HeaderTooLarge | SafeTensorError::InvalidHeaderLength => format!(
            "its first {PREFIX_BYTES} bytes announce a header of {} bytes; the file has {} more bytes{}",
            header_len(bytes).unwrap_or_default(),
            bytes.len().saturating_sub(PREFIX_BYTES),
            if matches!(error, SafeTensorError::HeaderTooLarge) { ", and 100000000 is the limit" } else { "" },
        ),
        _ => header_text(bytes)
            .and_then(|text| serde_json::from_str::<Map<String, Value>>(text).ok())
            .and_then(|header| explain_entries(&header, data_len(bytes)))
            .unwrap_or_else(|| error.to_string()),
    }
}

/// Bytes after the header.
fn data_len(bytes: &[u8]) -> usize {
    let header = header_len(bytes).and_then(|len| usize::try_from(len).ok()).unwrap_or(usize::MAX);
    bytes.len().saturating_sub(header.saturating_add(PREFIX_BYTES))
}

/// The first fault among the entries of a header that is JSON.
fn explain_entries(header: &Map<String, Value>, data_len: usize) -> Option<String> {
    let mut entries: Vec<(&str, TensorInfo)> = Vec::new();
    for (name, value) in header {
        if name == "__metadata__" {
            match value {
                Value::Null => {}
                Value::Object(map) => {
                    if let Some((key, value)) = map.iter().find(|(_, value)| !value.is_string()) {
                        return Some(format!("metadata `{key}` is {value}; a string is needed"));
                    }
                }
                other => return Some(format!("`__metadata__` is {other}; an object of strings is needed")),
            }
            continue;
        }
        match serde_json::from_value::<TensorInfo>(value.clone()) {
            Ok(info) => entries.push((name, info)),
            Err(error) => return Some(format!("tensor `{name}`: {error}")),
        }
    }
    entries.sort_by_key(|(_, info)| info.data_offsets);
    let mut next = 0;
    for (name, info) in entries {
        let TensorInfo { dtype, shape, data_offsets: (start, end) } = info;
        if start != next || end < start {
            return Some(format!(
                "tensor `{name}` has data_offsets [{start}, {end}]; tensors must follow one another without gap or \
                 overlap, so a start of {next} and an end not before it are needed"
            ));
        }
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, dim| bits.checked_mul(*dim));
        match bits {
            Some(bits) if bits % 8 == 0 && bits / 8 == end - start => {}
            Some(bits) => {
                return Some(format!(
                    "tensor `{name}` of shape {shape:?} and type {dtype} needs {} bytes; data_offsets [{start}, {end}] \
                     give it {}",
                    bits.div_ceil(8),
                    end - start
                ));
            }
            None => {
                return Some(format!("tensor `{name}` has shape {shape:?}: more elements than can be addressed"));
            }
        }
        next = end;
    }
    (next != data_len).then(|| {
        let verdict = if data_len < next { "it is cut short" } else { "there is something after its last tensor" };
        format!("the header describes {next} bytes of data; the file has {data_len}: {verdict}")
    })
}

/// The first name that a header, or the metadata in it, has twice, in a sentence.
fn duplicate(text: &str) -> Option<String> {
    let Names { twice, metadata } = serde_json::from_str(text).ok()?;
    match (twice, metadata) {
        (Some(name), _) => Some(format!("the header describes tensor `{name}` twice")),
        (None, Some(key)) => Some(format!("the metadata has `{key}` twice")),
        (None, None) => None,
    }
}

/// What a map has twice, and what the map under `__metadata__` in it has twice.
#[derive(Default)]
struct Names {
    twice: Option<String>,
    metadata: Option<String>,
}

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Names;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Names, A::Error> {
                let mut seen = HashSet::new();
                let mut names = Names::default();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        // It may be null.
                        let inner: Option<Self::Value> = map.next_value()?;
                        names.metadata = inner.and_then(|inner| inner.twice).or(names.metadata);
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                    if !seen.insert(name.clone()) {
                        names.twice.get_or_insert(name);
                    }
                }
                Ok(names)
            }
        }
        deserializer.deserialize_map(Map)
    }
}
