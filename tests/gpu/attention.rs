//! Every row of the table is inside the bound.

use paged_attention_cases::{CaseSpec, full, options, options_full, quick};

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

/// Groups of a table, one test each, so that the time of each shows and they overlap on the host.
macro_rules! groups {
    ($groups:ident of $table:ident: $($name:ident: $group:literal),* $(,)?) => {
        const $groups: &[&str] = &[$($group),*];
        $(
            #[test]
            fn $name() {
                go(concat!("table/", $group), $table(), &[$group]);
            }
        )*
    };
}

groups! {
    GROUPS of quick:
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

// What changes scores.
groups! {
    OPTION_GROUPS of options:
    table_window: "window",
    table_softcap: "softcap",
    table_alibi: "alibi",
    table_sinks: "sinks",
    table_masks: "masks",
    table_bias: "bias",
    table_prefix: "prefix",
}

#[test]
fn no_group_is_forgotten() {
    for (table, groups) in [(quick(), GROUPS), (options(), OPTION_GROUPS), (options_full(), OPTION_GROUPS)] {
        for spec in table {
            let group = spec.name.split('/').next().unwrap();
            assert!(groups.contains(&group), "no test runs the group of {}", spec.name);
        }
    }
}

#[test]
#[ignore = "full sizes and crossed options: minutes on a software adapter"]
fn table_full() {
    go("table/full", full(), &["full"]);
    go("table/options-full", options_full(), OPTION_GROUPS);
}
