//! Where results go: checked before anything runs, written whole or not at all.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

use half::f16;
use paged_attention::{Case, Dtype, Output};
use safetensors::tensor::TensorView;
use thiserror::Error;

/// A place where no result can be written: exit status 2.
#[derive(Debug, Error)]
pub enum OutputError {
    /// The place is an input, under this or another name.
    #[error("--out {}: this is the input {}; another place is needed", out.display(), input.display())]
    IsInput {
        /// The place.
        out: PathBuf,
        /// The input.
        input: PathBuf,
    },
    /// Two cases of one name would go to the same place.
    #[error(
        "--out {}: the results of {} and {} would both go there; cases of different names are needed",
        out.display(), first.display(), second.display()
    )]
    Collision {
        /// The place.
        out: PathBuf,
        /// A case.
        first: PathBuf,
        /// Another.
        second: PathBuf,
    },
    /// Something is there that cannot be replaced by a file, or is no folder where one is needed.
    #[error("--out {}: found {found}; {needed} is needed", out.display())]
    Kind {
        /// The place.
        out: PathBuf,
        /// What is there.
        found: &'static str,
        /// What should be there.
        needed: &'static str,
    },
    /// The folder does not exist, or nothing can be written there.
    #[error("--out {}: no file can be written there: {error}", out.display())]
    Unwritable {
        /// The place.
        out: PathBuf,
        /// The reason.
        error: std::io::Error,
    },
    /// The result has no valid form as a file. A fault of this program.
    #[error("--out {}: {error}", out.display())]
    Format {
        /// The place.
        out: PathBuf,
        /// The reason.
        error: safetensors::SafeTensorError,
    },
}

/// The places for the results of some cases, all checked.
///
/// With `into_folder`, `out` is a folder (made when the first result is written, if it does not exist) that gets a file
/// per case under the case's name; otherwise there is one case and `out` is its file.
pub fn plan(out: &Path, inputs: &[PathBuf], into_folder: bool) -> Result<Vec<PathBuf>, OutputError> {
    let mut places = Vec::with_capacity(inputs.len());
    if into_folder {
        if exists(out) && !out.is_dir() {
            return Err(OutputError::Kind { out: out.to_owned(), found: "a file", needed: "a folder" });
        }
        for input in inputs {
            places.push(out.join(input.file_name().unwrap_or(input.as_os_str())));
        }
        check_collisions(&places, inputs)?;
    } else {
        check_name(out)?;
        places.extend(inputs.iter().map(|_| out.to_owned()));
    }
    let by_identity: HashMap<Identity, &PathBuf> =
        inputs.iter().filter_map(|input| Some((Identity::of(input)?, input))).collect();
    for place in &places {
        if let Some(input) = Identity::of(place).and_then(|identity| by_identity.get(&identity)) {
            return Err(OutputError::IsInput { out: place.clone(), input: (*input).clone() });
        }
        check_kind(place)?;
    }
    if !places.is_empty() {
        check_writable(out, into_folder)?;
    }
    Ok(places)
}

/// The same for a single file that no input could be.
pub fn check_file(out: &Path) -> Result<(), OutputError> {
    check_name(out)?;
    check_kind(out)?;
    check_writable(out, false)
}

fn check_name(out: &Path) -> Result<(), OutputError> {
    if names_a_folder(out) {
        let (found, needed) = ("the name of a folder", "the name of a new or an ordinary file");
        return Err(OutputError::Kind { out: out.to_owned(), found, needed });
    }
    Ok(())
}

/// Whether a name can only be a folder's, whether there is one or not: it ends in a separator, `.` or `..`.
fn names_a_folder(out: &Path) -> bool {
    // A path's components leave out a separator or `.` at the end.
    let name = out.to_string_lossy();
    let last = name.rsplit(std::path::is_separator).next().unwrap_or_default();
    !name.is_empty() && ["", ".", ".."].contains(&last)
}

/// Whether there is anything, a dangling link included.
fn exists(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok()
}

fn check_collisions(places: &[PathBuf], inputs: &[PathBuf]) -> Result<(), OutputError> {
    let mut seen: HashMap<OsString, &PathBuf> = HashMap::new();
    for (place, input) in places.iter().zip(inputs) {
        // File systems of Windows and macOS mostly take names that differ in case for the same.
        let ignores_case = cfg!(any(windows, target_os = "macos"));
        let name = if ignores_case { place.as_os_str().to_ascii_lowercase() } else { place.as_os_str().to_owned() };
        if let Some(first) = seen.insert(name, input) {
            return Err(OutputError::Collision { out: place.clone(), first: first.clone(), second: input.clone() });
        }
    }
    Ok(())
}

/// A result replaces what is there, which must therefore be an ordinary file: never a device, a pipe or a folder.
fn check_kind(place: &Path) -> Result<(), OutputError> {
    let found = match std::fs::metadata(place) {
        // Renaming over it would succeed, but somebody has said that it should stay.
        Ok(metadata) if metadata.is_file() && metadata.permissions().readonly() => "a read-only file",
        Ok(metadata) if metadata.is_file() => return Ok(()),
        Ok(metadata) if metadata.is_dir() => "a folder",
        Ok(_) => "a device or pipe",
        Err(_) if exists(place) => "a symbolic link that leads nowhere",
        Err(_) => return Ok(()),
    };
    Err(OutputError::Kind { out: place.to_owned(), found, needed: "the name of a new or an ordinary file" })
}

/// Tries to write where the results will go, and leaves nothing behind.
fn check_writable(out: &Path, into_folder: bool) -> Result<(), OutputError> {
    let folder = if into_folder {
        // The folder is made only when there is a result: until then its nearest existing parent answers.
        out.ancestors().map(or_here).find(|folder| exists(folder)).unwrap_or(Path::new("."))
    } else {
        &folder_of(out)
    };
    tempfile::tempfile_in(folder)
        .and_then(|mut file| file.write_all(b"x"))
        .map_err(|error| OutputError::Unwritable { out: out.to_owned(), error })
}

/// The folder that a file lies in; links are followed, since the file that a link leads to is what is replaced.
fn folder_of(file: &Path) -> PathBuf {
    let target = std::fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    or_here(target.parent().unwrap_or(Path::new("."))).to_owned()
}

/// A relative name's parent is empty; it means the current folder.
fn or_here(folder: &Path) -> &Path {
    if folder.as_os_str().is_empty() { Path::new(".") } else { folder }
}

/// What tells two files apart whatever their names.
#[derive(PartialEq, Eq, Hash)]
enum Identity {
    /// Device and inode: sees through links of both kinds.
    #[cfg(unix)]
    Inode(u64, u64),
    /// The resolved path. Hard links go unnoticed and do no harm: a result replaces the name, not the content.
    #[cfg(not(unix))]
    Path(PathBuf),
}

impl Identity {
    /// `None` where there is no such file.
    fn of(path: &Path) -> Option<Self> {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            std::fs::metadata(path).ok().map(|metadata| Self::Inode(metadata.dev(), metadata.ino()))
        }
        #[cfg(not(unix))]
        {
            std::fs::canonicalize(path).ok().map(Self::Path)
        }
    }
}

/// Writes `out` and `lse` beside the place and moves the finished file there.
pub fn write(place: &Path, case: &Case, output: &Output) -> Result<(), OutputError> {
    let geometry = case.geometry();
    let rows = case.q().shape().first().copied().unwrap_or(0);
    let heads = geometry.q_heads() as usize;
    let (dtype, out): (_, Vec<u8>) = match output.out_dtype {
        // The kernel stored f16, so every value is one and nothing is rounded again.
        Dtype::F16 => {
            (safetensors::Dtype::F16, output.out.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect())
        }
        _ => (safetensors::Dtype::F32, output.out.iter().flat_map(|x| x.to_le_bytes()).collect()),
    };
    let lse: Vec<u8> = output.lse.iter().flat_map(|x| x.to_le_bytes()).collect();
    let format = |error| OutputError::Format { out: place.to_owned(), error };
    let tensors = [
        ("out", TensorView::new(dtype, vec![rows, heads, geometry.v_head_dim() as usize], &out).map_err(format)?),
        ("lse", TensorView::new(safetensors::Dtype::F32, vec![rows, heads], &lse).map_err(format)?),
    ];
    let bytes = safetensors::serialize(tensors, None).map_err(format)?;
    replace(place, &bytes).map_err(|error| OutputError::Unwritable { out: place.to_owned(), error })
}

/// Writes a text beside the place and moves the finished file there.
pub fn write_text(place: &Path, text: &str) -> Result<(), OutputError> {
    replace(place, text.as_bytes()).map_err(|error| OutputError::Unwritable { out: place.to_owned(), error })
}

/// Writes a file whole or not at all; makes its folder if there is none.
pub fn replace(place: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let target = std::fs::canonicalize(place).unwrap_or_else(|_| place.to_owned());
    let folder = folder_of(&target);
    std::fs::create_dir_all(&folder)?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".paged-attention-");
    #[cfg(unix)]
    {
        // The usual rights of a new file (the umask still applies) instead of a temporary one's.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let mut file = builder.tempfile_in(&folder)?;
    file.write_all(bytes)?;
    file.persist(&target).map_err(|error| error.error)?;
    Ok(())
}
