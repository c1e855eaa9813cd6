//! Parts of the keys that are lost, counted twice or taken from another row where sequences share prefixes.

use paged_attention_cases::{SharedSpec, share_pages, shared};

use super::*;

/// A row of the table of shared prefixes, with small heads.
fn row(name: &str) -> SharedSpec {
    let name = format!("shared/{name}-f32");
    let row = shared().into_iter().find(|row| row.spec.name == name).unwrap();
    SharedSpec { spec: CaseSpec { heads: HEADS, ..row.spec }, ..row }
}

fn noticed_shared(gpu: &Gpu, fault: &str, name: &str, edits: &[SourceEdit]) {
    let SharedSpec { spec, prefixes } = row(name);
    let case = share_pages(&build(&spec).unwrap(), &prefixes).unwrap();
    let shared = |options| RunOptions { shared_prefixes: prefixes.clone(), ..options };
    noticed_with(gpu, fault, (&spec, &case), shared, |_| edits.to_vec(), judged);
}

#[test]
fn a_source_of_a_merge_is_lost_or_counted_twice() {
    let Some(gpu) = gpu() else { return };
    let kernel = KernelId::Merge;
    for (fault, from, to) in [
        ("the outermost prefix lost", "var at = item.key_begin;", "var at = item.key_begin + 1u;"),
        ("the last source lost", "for (; at < item.key_end; at++) {", "for (; at + 1u < item.key_end; at++) {"),
        ("the first source instead of each", "sequence(plan[at])", "sequence(plan[item.key_begin])"),
        ("splits of a source lost", "split < source.splits; split++", "split < 1u; split++"),
    ] {
        // A loop that ends too early is told by its kernel; what is asked here is whether the result tells.
        let mut edits = vec![edit(kernel, from, to)];
        edits.push(edit(kernel, "report_error(ERROR_CUT_SHORT);", ""));
        noticed_shared(gpu, fault, "tree", &edits);
    }
}

#[test]
fn a_row_takes_the_state_of_another() {
    let Some(gpu) = gpu() else { return };
    let offset = "row + (seq.q_begin - source.q_begin) * GROUP";
    for (fault, to) in [
        ("no offset", "row"),
        ("tokens for rows", "row + (seq.q_begin - source.q_begin)"),
        ("the offset in the call", "row + seq.q_begin * GROUP"),
    ] {
        // Sequences ahead of the prefix.
        noticed_shared(gpu, fault, "odd", &[edit(KernelId::Merge, offset, to)]);
    }
}

#[test]
fn keys_on_both_sides_of_a_prefix_end() {
    let Some(gpu) = gpu() else { return };
    let end = edit(KernelId::Prefill, "min(end_visible(own, token), item.key_end)", "end_visible(own, token)");
    let begin = edit(KernelId::Prefill, "max(first_visible(own, token), item.key_begin)", "first_visible(own, token)");
    // Prefixes of 259 and 33 tokens, which end inside steps.
    noticed_shared(gpu, "keys behind a prefix's end", "odd", &[end]);
    noticed_shared(gpu, "keys before a sequence's own", "odd", &[begin]);
}

#[test]
fn a_prefix_is_masked_as_if_it_were_a_sequence() {
    let Some(gpu) = gpu() else { return };
    let own = "let own = sequence(plan[params.owners + packed_row]);";
    let edits: Vec<_> =
        [KernelId::Prefill, KernelId::Decode].map(|kernel| edit(kernel, own, "let own = seq;")).to_vec();
    for name in ["rows-inside", "chunks", "tree"] {
        noticed_shared(gpu, "rows of the prefix, not of their sequences", name, &edits);
    }
}
