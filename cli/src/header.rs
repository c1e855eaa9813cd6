//! Opens a safetensors file and, where the `safetensors` crate refuses it, says in which tensor the fault lies.

use std::collections::HashMap;
use std::fmt;

use safetensors::tensor::TensorInfo;
use safetensors::{SafeTensorError, SafeTensors};
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
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
        Some(name) => Err(InputError::Header(format!("the header describes tensor `{name}` twice"))),
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

/// The first name that a header has twice.
fn duplicate(text: &str) -> Option<String> {
    struct Names;
    impl<'de> Visitor<'de> for Names {
        type Value = Option<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut seen = std::collections::HashSet::new();
            let mut twice = None;
            while let Some((name, IgnoredAny)) = map.next_entry::<String, _>()? {
                if !seen.insert(name.clone()) {
                    twice.get_or_insert(name);
                }
            }
            Ok(twice)
        }
    }
    serde_json::Deserializer::from_str(text).deserialize_map(Names).ok().flatten()
}
