//! Places for the output that cannot be used are found before an adapter is opened.

use std::path::Path;

use crate::support::{File, Run, folder_with, names_in, without_adapter};

fn refused(folder: &Path, args: &[&str], says: &[&str]) {
    let before = names_in(folder);
    let run = without_adapter(folder, &[&["attend"], args].concat());
    check(&run, says);
    assert_eq!(names_in(folder), before, "{args:?}");
}

fn check(run: &Run, says: &[&str]) {
    assert_eq!(run.code, Some(2), "{run:?}");
    assert_eq!(run.stderr.matches("error:").count(), 1, "{run:?}");
    assert!(run.stdout.is_empty(), "{run:?}");
    for part in says {
        assert!(run.stderr.contains(part), "{part:?} is not said: {run:?}");
    }
}

#[test]
fn the_input_itself_under_any_name() {
    let (folder, case) = folder_with(&File::contiguous().bytes());
    let here = folder.path();
    let before = std::fs::read(&case).unwrap();
    std::fs::create_dir(here.join("sub")).unwrap();
    std::fs::hard_link(&case, here.join("hard.safetensors")).unwrap();
    let absolute = case.to_str().unwrap();
    let mut names = vec!["case.safetensors", "./case.safetensors", "sub/../case.safetensors", absolute];
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("case.safetensors", here.join("soft.safetensors")).unwrap();
        std::os::unix::fs::symlink("..", here.join("sub/up")).unwrap();
        names.extend(["soft.safetensors", "hard.safetensors", "sub/up/case.safetensors"]);
        refused(here, &["soft.safetensors", "--out", "hard.safetensors"], &["is the input"]);
    }
    for name in names {
        refused(here, &["case.safetensors", "--out", name], &["--out", "is the input", "another place"]);
    }
    refused(here, &[".", "--out", "."], &["is the input"]);
    assert_eq!(std::fs::read(&case).unwrap(), before);
}

#[test]
fn another_input() {
    let (folder, case) = folder_with(&File::contiguous().bytes());
    std::fs::create_dir(folder.path().join("other")).unwrap();
    std::fs::copy(&case, folder.path().join("other/case.safetensors")).unwrap();
    let both = ["case.safetensors", "other/case.safetensors", "--out"];
    refused(folder.path(), &[&both[..], &["other"]].concat(), &["--out"]);
    refused(folder.path(), &[&both[..], &["new"]].concat(), &["would both go there", "other/case.safetensors"]);
}

#[test]
fn places_that_cannot_be_written() {
    let (folder, _) = folder_with(&File::contiguous().bytes());
    let here = folder.path();
    std::fs::create_dir(here.join("folder")).unwrap();
    std::fs::write(here.join("file"), "text").unwrap();
    let case = |out| ["case.safetensors", "--out", out];
    refused(here, &case("nowhere/out.safetensors"), &["nowhere/out.safetensors", "no file can be written"]);
    refused(here, &case("file/out.safetensors"), &["file/out.safetensors", "no file can be written"]);
    refused(here, &case("folder"), &["found a folder", "needed"]);
    refused(here, &case(""), &["--out"]);
    for name in ["new/", "folder/new/", "folder/new//", "new/.", "folder/..", "folder/"] {
        refused(here, &case(name), &[name, "the name of a folder", "is needed"]);
    }
    refused(here, &[".", "--out", "file"], &["found a file", "a folder is needed"]);
    refused(here, &[".", "--out", "file/deeper"], &["no file can be written"]);
    let mut permissions = std::fs::metadata(here.join("file")).unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(here.join("file"), permissions).unwrap();
    refused(here, &case("file"), &["read-only"]);
    #[cfg(unix)]
    {
        refused(here, &case("/dev/null"), &["a device or pipe"]);
        std::os::unix::fs::symlink("gone", here.join("dangling")).unwrap();
        refused(here, &case("dangling"), &["leads nowhere"]);
    }
    #[cfg(target_os = "linux")]
    refused(here, &case("/proc/out.safetensors"), &["no file can be written"]);
}

/// A folder for results is made when there is one, not before.
#[test]
fn no_folder_is_made_in_vain() {
    let (folder, _) = folder_with(&File::contiguous().bytes());
    let run = without_adapter(folder.path(), &["attend", ".", "--out", "new/results"]);
    assert_eq!(run.code, Some(3), "{run:?}");
    assert_eq!(names_in(folder.path()), ["case.safetensors"]);
}
