//! What the documents name exists.

// The short forms are allowed in test functions only; here the helpers belong to them.
#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::fs;
use std::path::Path;

/// Names of test functions in Rust files under `folder`.
fn tests(folder: &Path, names: &mut HashSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            tests(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let mut is_test = false;
            for line in text.lines().map(str::trim) {
                if line == "#[test]" {
                    is_test = true;
                } else if let Some(rest) = line.strip_prefix("fn ") {
                    if is_test {
                        names.extend(rest.split('(').next().map(str::to_owned));
                    }
                    is_test = false;
                }
            }
        }
    }
}

/// What stands between backquotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Whether every fault up to 32 has a line, and tests that exist.
fn check(table: &str, names: &HashSet<String>) -> Result<(), String> {
    let mut seen = Vec::new();
    for line in table.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, number, _, tests, ..] = cells.as_slice() else {
            return Err(format!("not a line of the table: {line}"));
        };
        let Ok(number) = number.parse::<u32>() else { continue };
        let tests: Vec<&str> = quoted(tests).collect();
        if tests.is_empty() {
            return Err(format!("fault {number} has no test"));
        }
        if let Some(missing) = tests.iter().find(|test| !names.contains(**test)) {
            return Err(format!("fault {number}: there is no test `{missing}`"));
        }
        // Of the list's own name at least one.
        let own = format!("fault_{number:02}_");
        if !tests.iter().any(|test| test.starts_with(&own)) {
            return Err(format!("fault {number}: no test is named {own}.."));
        }
        seen.push(number);
    }
    match (1..=32).find(|number| !seen.contains(number)) {
        Some(missing) => Err(format!("fault {missing} has no line")),
        None => Ok(()),
    }
}

#[test]
fn every_fault_has_a_test_that_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = HashSet::new();
    for folder in ["tests", "src", "cli", "cases"] {
        tests(&root.join(folder), &mut names);
    }
    let table = fs::read_to_string(root.join("docs/faults.md")).unwrap();
    check(&table, &names).unwrap();
    // And every other test that the document names by itself.
    let mut open =
        quoted(&table).filter(|name| name.contains('_') && !name.contains(['.', ' ', '/']) && !name.ends_with('_'));
    assert_eq!(open.find(|name| !names.contains(*name)), None);
    // A name that is misspelt, and a line that is lost, are noticed.
    let misspelt = table.replace("fault_05_logarithms_of_two_bases", "fault_05_logarithm_of_two_bases");
    assert!(check(&misspelt, &names).unwrap_err().contains("fault_05_logarithm_of"));
    let shorter: Vec<&str> = table.lines().filter(|line| !line.starts_with("| 21 ")).collect();
    assert!(check(&shorter.join("\n"), &names).unwrap_err().contains("fault 21 has no line"));
}
