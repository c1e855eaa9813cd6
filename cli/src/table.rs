//! A report as a table for people.

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::choosing::Chosen;
use crate::report::{AdapterName, CaseResult, Kernel, Measured, Shape, Stored, Summary, UNUSABLE, WorstElement};

/// `1 row`, `2 rows`
pub fn counted(count: impl Into<u64>, what: &str) -> String {
    let count = count.into();
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Rows of cells, the columns as wide as they must be.
pub fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(text, "{}", cells.join("  ").trim_end());
    }
    text
}

impl Shape {
    /// `2 seqs, 5 rows × 8 heads on 37 keys × 2 heads, d 64`
    fn line(&self) -> String {
        let dims = if self.head_dim == self.v_head_dim {
            format!("d {}", self.head_dim)
        } else {
            format!("d {} / {}", self.head_dim, self.v_head_dim)
        };
        format!(
            "{}, {} x {} on {} x {}, {dims}",
            counted(self.seqs as u64, "seq"),
            counted(self.total_q, "row"),
            counted(self.q_heads, "head"),
            counted(self.total_kv, "key"),
            counted(self.kv_heads, "head")
        )
    }

    /// `, window 128 left and 0 right, cap 30, sinks, bias`
    fn options(&self) -> String {
        let side = |keys: Option<u32>| keys.map_or("all".to_owned(), |keys| keys.to_string());
        let window = (self.window_left, self.window_right);
        let window = (window != (None, None))
            .then(|| format!("window {} left and {} right", side(self.window_left), side(self.window_right)));
        let cap = self.softcap.map(|cap| format!("cap {cap}"));
        let extras = self.extras.iter().map(|name| (*name).to_owned());
        window.into_iter().chain(cap).chain(extras).map(|option| format!(", {option}")).collect()
    }
}

impl Measured {
    fn time(&self) -> String {
        match self.gpu_ms {
            Some(gpu_ms) => format!("{gpu_ms:.3} ms on the GPU, {:.3} ms in all", self.wall_ms),
            None => format!("{:.3} ms in all (the adapter has no timestamps)", self.wall_ms),
        }
    }

    fn kernels(&self) -> String {
        let names: BTreeSet<&str> = self.kernel.iter().map(|kernel| kernel.name.as_str()).collect();
        names.into_iter().collect::<Vec<_>>().join("+")
    }

    /// `outside the bound: out[row 3, head 1, dim 7] is 0.1, 0.2 is expected within 1e-7 (ratio 1e6)`
    fn verdict(&self) -> String {
        // Of the arithmetic, or of the storage where that is what is outside.
        let outside = |worst: &&WorstElement| worst.ratio > 1.0 || worst.ratio.is_nan();
        let of_storage = || self.storage.as_ref().and_then(|storage| storage.worst.as_ref());
        let element = self.worst.as_ref().filter(outside).or_else(of_storage).filter(outside).map(|worst| {
            let dim = worst.dim.map_or(String::new(), |dim| format!(", dim {dim}"));
            format!(
                "{}[row {}, head {}{dim}] is {:e}, expected {:e} within {:.3e}, ratio {:.3}",
                worst.what, worst.row, worst.head, worst.found, worst.expected, worst.bound, worst.ratio
            )
        });
        match (self.passed, element) {
            (true, _) => "inside the bound".to_owned(),
            (false, Some(element)) => format!("OUTSIDE the bound; worst: {element}"),
            (false, None) => "OUTSIDE the bound".to_owned(),
        }
    }
}

/// The table for one case.
pub fn single(result: &CaseResult) -> String {
    let mut text = String::new();
    let Some(m) = &result.measured else {
        return text;
    };
    let mut line = |name: &str, value: &str| {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{name:<9} {value}");
    };
    let AdapterName { adapter, backend, driver } = &m.adapter;
    line("case", &result.case);
    line("adapter", &format!("{adapter} ({backend}, {driver})"));
    if m.kernel.is_empty() {
        line("kernels", "none: nothing to compute");
    }
    for (index, kernel) in m.kernel.iter().enumerate() {
        let Kernel { name, reason, workgroups } = kernel;
        line(
            if index == 0 { "kernels" } else { "" },
            &format!("{name}, {}: {reason}", counted(*workgroups, "workgroup")),
        );
    }
    for (index, chosen) in m.choice.iter().flat_map(Chosen::lines).enumerate() {
        line(if index == 0 { "choice" } else { "" }, &chosen);
    }
    let shape = &m.shape;
    line("shape", &shape.line());
    line(
        "",
        &format!(
            "q {}, kv {}{}, out {}, pages of {}{}, {}, scale {}{}",
            shape.q_dtype,
            shape.kv_dtype,
            if shape.kv_dtype == shape.kv_input_dtype {
                String::new()
            } else {
                format!(" from {}", shape.kv_input_dtype)
            },
            shape.out_dtype,
            shape.page_size,
            if shape.paged_input { " (the file's)" } else { "" },
            if shape.causal { "causal" } else { "not causal" },
            shape.scale,
            shape.options()
        ),
    );
    if let (Some(bytes), Some(f16)) = (shape.kv_bytes_per_token, shape.kv_bytes_per_token_f16) {
        // A page is padded as a whole, so a token may have a part of a byte.
        let rounded = |bytes: f64| if bytes.fract() == 0.0 { format!("{bytes}") } else { format!("{bytes:.1}") };
        line("memory", &format!("{} bytes per token in the pages; {} in f16", rounded(bytes), rounded(f16)));
    }
    line("errors", &format!("max |out - float64| {:.3e}, nmse {:.3e}", m.max_abs_error, m.nmse));
    line("ratio", &format!("measured/bound {:.3} of out, {:.3} of lse", m.max_bound_ratio_out, m.max_bound_ratio_lse));
    if let Some(stored) = &m.storage {
        let Stored { max_abs_error, nmse, max_bound_ratio_out: out, max_bound_ratio_lse: lse, .. } = stored;
        let (k, v) = (stored.max_bound_ratio_k, stored.max_bound_ratio_v);
        line("storage", &format!("moves out by up to {max_abs_error:.3e}, nmse {nmse:.3e}"));
        line("", &format!("measured/bound {out:.3} of out, {lse:.3} of lse, {k:.3} of keys, {v:.3} of values"));
    }
    line("time", &m.time());
    if let Some(out) = &m.out {
        line("written", out);
    }
    line("verdict", &m.verdict());
    text
}

/// The table for several cases.
pub fn several(summary: &Summary) -> String {
    let mut text = String::new();
    if let (Some(adapter), Some(backend), Some(driver)) = (&summary.adapter, &summary.backend, &summary.driver) {
        let _ = writeln!(text, "adapter   {adapter} ({backend}, {driver})\n");
    }
    let rows: Vec<[String; 7]> = std::iter::once(
        ["", "ratio out", "ratio lse", "max error", "ms", "case", "kernels and shape"].map(str::to_owned),
    )
    .chain(summary.cases.iter().map(|case| match &case.measured {
        Some(m) => [
            if m.passed { "ok" } else { "OUTSIDE" }.to_owned(),
            format!("{:.3}", m.max_bound_ratio_out),
            format!("{:.3}", m.max_bound_ratio_lse),
            format!("{:.2e}", m.max_abs_error),
            format!("{:.3}", m.gpu_ms.unwrap_or(m.wall_ms)),
            case.case.clone(),
            format!("{}; {}", m.kernels(), m.shape.line()),
        ],
        None => {
            let status = if case.exit == UNUSABLE { "UNUSABLE" } else { "NOT RUN" };
            let dash = || "-".to_owned();
            [status.into(), dash(), dash(), dash(), dash(), case.case.clone(), dash()]
        }
    }))
    .collect();
    text += &columns(&rows);
    text.push('\n');
    for case in summary.cases.iter() {
        if let Some(measured) = case.measured.as_ref().filter(|measured| !measured.passed) {
            let _ = writeln!(text, "{}: {}", case.case, measured.verdict());
        }
    }
    let _ = write!(
        text,
        "{}: {} inside the bound, {} outside, {} unusable, {} not run",
        counted(summary.case_count as u64, "case"),
        summary.passed,
        summary.outside_bound,
        summary.unusable,
        summary.device_failed
    );
    if let Some(worst) = &summary.worst_case {
        let _ = write!(text, "; largest measured/bound ratio {:.3} in {worst}", summary.max_bound_ratio);
    }
    text.push('\n');
    text
}
