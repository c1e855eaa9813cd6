//! The cases that the command line names: files, and the files of folders.

use std::path::{Path, PathBuf};

use crate::error::InputError;

/// An argument that names no case, and why.
pub type BadArgument = (PathBuf, InputError);

/// Files to run, in the order given, and the arguments that name none. A folder stands for its `*.safetensors`
/// files sorted by name; folders inside it are not searched.
pub fn collect(arguments: &[PathBuf]) -> (Vec<PathBuf>, Vec<BadArgument>) {
    let mut files = Vec::new();
    let mut bad = Vec::new();
    for argument in arguments {
        match expand(argument) {
            Ok(found) if found.is_empty() => bad.push((argument.clone(), InputError::EmptyFolder)),
            Ok(found) => files.extend(found),
            Err(error) => bad.push((argument.clone(), error.into())),
        }
    }
    (files, bad)
}

/// Reads a file. A pipe or a device is refused unread, since it may have no end or keep the command waiting.
pub fn read(path: &Path) -> Result<Vec<u8>, InputError> {
    let kind = std::fs::metadata(path)?.file_type();
    if kind.is_dir() {
        return Err(InputError::NotAFile { found: "a folder" });
    }
    if !kind.is_file() {
        return Err(InputError::NotAFile { found: "a device or pipe" });
    }
    Ok(std::fs::read(path)?)
}

fn expand(argument: &Path) -> std::io::Result<Vec<PathBuf>> {
    if !std::fs::metadata(argument)?.is_dir() {
        return Ok(vec![argument.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(argument)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") && !path.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
