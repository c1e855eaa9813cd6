//! Every row of the table is inside the bound.

use paged_attention_cases::{CaseSpec, full, quick};

use crate::common::{Tally, gpu};

fn go(test: &'static str, table: Vec<CaseSpec>, groups: &[&str]) {
    let Some(gpu) = gpu() else { return };
    let mut tally = Tally::new(test);
    for spec in table {
        if groups.iter().any(|group| spec.name.starts_with(&format!("{group}/"))) {
            tally.check(gpu, &spec);
        }
    }
    tally.finish();
}

/// Groups of the quick table, one test each, so that the time of each shows and they overlap on the host.
macro_rules! quick_groups {
    ($($name:ident: $group:literal),* $(,)?) => {
        const GROUPS: &[&str] = &[$($group),*];
        $(
            #[test]
            fn $name() {
                go(concat!("table/", $group), quick(), &[$group]);
            }
        )*
    };
}

quick_groups! {
    table_lengths: "lengths",
    table_pools: "pools",
    table_decode: "decode",
    table_mixed: "mixed",
    table_dims: "dims",
    table_empty: "empty",
    table_splits: "splits",
    table_sizes: "sizes",
    table_long: "long",
    table_needles: "needles",
    table_items: "items",
    table_heads: "heads",
    table_values: "values",
    table_dtypes: "dtypes",
}

#[test]
fn no_group_is_forgotten() {
    for spec in quick() {
        let group = spec.name.split('/').next().unwrap();
        assert!(GROUPS.contains(&group), "no test runs the group of {}", spec.name);
    }
}

#[test]
#[ignore = "full sizes and crossed options: minutes on a software adapter"]
fn table_full() {
    go("table/full", full(), &["full"]);
}
