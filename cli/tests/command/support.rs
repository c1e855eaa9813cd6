//! Makes case files, broken ones included, and runs the command on them.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

/// A safetensors file in the making; nothing about it is checked.
#[derive(Clone, Debug, Default)]
pub struct File {
    tensors: BTreeMap<String, (&'static str, Vec<usize>, Vec<u8>)>,
    metadata: BTreeMap<String, Value>,
}

impl File {
    /// Two sequences, 1 and 2 query rows on 4 and 6 contiguous keys, 4 heads over 2, dimension 8.
    pub fn contiguous() -> Self {
        Self::default()
            .f32("q", &[3, 4, 8])
            .f32("k", &[10, 2, 8])
            .f32("v", &[10, 2, 8])
            .i32("q_indptr", &[0, 1, 3])
            .i32("kv_indptr", &[0, 4, 10])
    }

    /// Sequences that share one page of 65,536 tokens, with a table of `pages` entries and `kv_len` keys each.
    pub fn on_one_page(q_indptr: &[u32], pages: u32, kv_len: u32) -> Self {
        let seqs = q_indptr.len() as u32 - 1;
        Self::default()
            .f16_zeros("q", &[q_indptr[seqs as usize] as usize, 1, 1])
            .f16_zeros("k_pages", &[1, 65_536, 1, 1])
            .f16_zeros("v_pages", &[1, 65_536, 1, 1])
            .u32("q_indptr", q_indptr)
            .u32("page_indptr", &(0..=seqs).map(|seq| seq * pages).collect::<Vec<_>>())
            .u32("page_ids", &vec![0; (seqs * pages) as usize])
            .u32("kv_len", &vec![kv_len; seqs as usize])
    }

    /// 65,536 heads and nothing else.
    pub fn many_heads() -> Self {
        Self::default()
            .f16_zeros("q", &[0, 65_536, 256])
            .f16_zeros("k", &[0, 65_536, 256])
            .f16_zeros("v", &[0, 65_536, 256])
    }

    /// The same rows on 5 and 8 keys in pages of 4, with a spare page.
    pub fn paged() -> Self {
        Self::default()
            .f32("q", &[3, 4, 8])
            .f32("k_pages", &[5, 4, 2, 8])
            .f32("v_pages", &[5, 4, 2, 8])
            .i32("q_indptr", &[0, 1, 3])
            .i32("page_indptr", &[0, 2, 4])
            .i32("page_ids", &[1, 0, 3, 2])
            .i32("kv_len", &[5, 8])
    }

    pub fn raw(mut self, name: &str, dtype: &'static str, shape: &[usize], bytes: Vec<u8>) -> Self {
        self.tensors.insert(name.to_owned(), (dtype, shape.to_vec(), bytes));
        self
    }

    /// Values between -1 and 1 that differ from element to element.
    pub fn f32(self, name: &str, shape: &[usize]) -> Self {
        let count: usize = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|i| ((i * 37 + name.len() * 11) % 101) as f32 / 50.0 - 1.0).collect();
        self.f32_values(name, shape, &values)
    }

    pub fn f32_values(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        self.raw(name, "F32", shape, values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    /// [`File::f32`] with one element replaced.
    pub fn f32_with(self, name: &str, shape: &[usize], at: usize, value: f32) -> Self {
        let mut file = self.f32(name, shape);
        if let Some((_, _, bytes)) = file.tensors.get_mut(name) {
            bytes[at * 4..at * 4 + 4].copy_from_slice(&value.to_le_bytes());
        }
        file
    }

    pub fn i32(self, name: &str, values: &[i32]) -> Self {
        self.raw(name, "I32", &[values.len()], values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn u32(self, name: &str, values: &[u32]) -> Self {
        self.raw(name, "U32", &[values.len()], values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub fn i64(self, name: &str, values: &[i64]) -> Self {
        self.raw(name, "I64", &[values.len()], values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    /// Zeros.
    pub fn f16_zeros(self, name: &str, shape: &[usize]) -> Self {
        self.raw(name, "F16", shape, vec![0; shape.iter().product::<usize>() * 2])
    }

    pub fn without(mut self, name: &str) -> Self {
        assert!(self.tensors.remove(name).is_some(), "no `{name}` to remove");
        self
    }

    pub fn meta(self, key: &str, value: &str) -> Self {
        self.meta_value(key, json!(value))
    }

    pub fn meta_value(mut self, key: &str, value: Value) -> Self {
        self.metadata.insert(key.to_owned(), value);
        self
    }

    /// The header, and the data that it describes.
    pub fn parts(&self) -> (Value, Vec<u8>) {
        let mut header = serde_json::Map::new();
        if !self.metadata.is_empty() {
            header.insert("__metadata__".into(), json!(self.metadata));
        }
        let mut data = Vec::new();
        for (name, (dtype, shape, bytes)) in &self.tensors {
            let start = data.len();
            data.extend_from_slice(bytes);
            header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}));
        }
        (Value::Object(header), data)
    }

    pub fn bytes(&self) -> Vec<u8> {
        let (header, data) = self.parts();
        assemble(&header.to_string(), &data)
    }

    /// The file with its header changed.
    pub fn with_header(&self, change: impl FnOnce(&mut Value)) -> Vec<u8> {
        let (mut header, data) = self.parts();
        change(&mut header);
        assemble(&header.to_string(), &data)
    }
}

/// A header's length, the header, the data.
pub fn assemble(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// What a run of the command left behind.
#[derive(Debug)]
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Run {
    /// The JSON object on standard output.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("no JSON ({error}): {self:?}"))
    }
}

fn run(mut command: Command) -> Run {
    let output = command.output().unwrap();
    Run {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn command(folder: &Path, args: &[impl AsRef<OsStr>]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paged-attention"));
    command.current_dir(folder).args(args);
    command
}

/// Runs the command where it can find no adapter: whatever it reports, it found out without one.
pub fn without_adapter(folder: &Path, args: &[impl AsRef<OsStr>]) -> Run {
    let mut command = command(folder, args);
    // The command is built without the `noop` backend, so this leaves it no backend at all.
    command.env("WGPU_BACKEND", "noop");
    run(command)
}

/// The same with 4 GiB of address space: enough for everything that a small file may ask for.
#[cfg(unix)]
pub fn in_little_memory(folder: &Path, args: &[&str]) -> Run {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -v 4194304 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_paged-attention")]);
    command.args(args).current_dir(folder).env("WGPU_BACKEND", "noop");
    run(command)
}

/// Runs a line of shell script in which `$0` is the command.
#[cfg(unix)]
pub fn in_shell(folder: &Path, line: &str) -> Run {
    let mut command = Command::new("sh");
    command.args(["-c", line, env!("CARGO_BIN_EXE_paged-attention")]).current_dir(folder);
    run(command)
}

/// Runs the command with the machine's adapters.
pub fn with_adapter(folder: &Path, args: &[impl AsRef<OsStr>]) -> Run {
    run(command(folder, args))
}

/// The same with variables set.
pub fn with_env(folder: &Path, args: &[impl AsRef<OsStr>], variables: &[(&str, &str)]) -> Run {
    let mut command = command(folder, args);
    command.envs(variables.iter().copied());
    run(command)
}

/// A folder with a file `case.safetensors` in it.
pub fn folder_with(case: &[u8]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("case.safetensors");
    std::fs::write(&path, case).unwrap();
    (folder, path)
}

/// Names in a folder, sorted.
pub fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// A case that must be refused.
pub struct Refusal {
    pub name: &'static str,
    pub case: Vec<u8>,
    pub flags: &'static [&'static str],
    /// Parts of the message: the tensor, what was found, what is needed.
    pub says: &'static [&'static str],
}

/// A row of a table of refusals.
pub fn refusal(name: &'static str, case: &File, says: &'static [&'static str]) -> Refusal {
    Refusal { name, case: case.bytes(), flags: &[], says }
}

/// A row with flags.
pub fn refusal_with(
    name: &'static str,
    case: &File,
    flags: &'static [&'static str],
    says: &'static [&'static str],
) -> Refusal {
    Refusal { name, case: case.bytes(), flags, says }
}

/// A row whose file is broken as such.
pub fn broken(name: &'static str, case: Vec<u8>, says: &'static [&'static str]) -> Refusal {
    Refusal { name, case, flags: &[], says }
}

/// Goes through the whole table and then reports every row that did not hold: exit status 2, one message that says
/// all of `says`, nothing on standard output, no file left behind, no adapter touched.
pub fn check_refusals(table: &[Refusal]) {
    let mut failures = Vec::new();
    for Refusal { name, case, flags, says } in table {
        for json in [false, true] {
            let (folder, _) = folder_with(case);
            let mut args = vec!["attend", "case.safetensors", "--out", "out.safetensors"];
            args.extend(json.then_some("--json"));
            args.extend(*flags);
            let run = without_adapter(folder.path(), &args);
            let mut wrong = Vec::new();
            if run.code != Some(2) {
                wrong.push("exit status 2 is needed".to_owned());
            }
            if !run.stdout.is_empty() {
                wrong.push("standard output must be empty".to_owned());
            }
            if run.stderr.matches("error:").count() != 1 {
                wrong.push("one message is needed".to_owned());
            }
            wrong.extend(
                says.iter().filter(|part| !run.stderr.contains(**part)).map(|part| format!("{part:?} is not said")),
            );
            if names_in(folder.path()) != ["case.safetensors"] {
                wrong.push(format!("files were left: {:?}", names_in(folder.path())));
            }
            if !wrong.is_empty() {
                failures.push(format!("{name} {flags:?}: {}\n  {run:?}", wrong.join("; ")));
            }
        }
    }
    assert!(failures.is_empty(), "{} runs of {} rows failed:\n{}", failures.len(), table.len(), failures.join("\n"));
}
