//! What was counted: as a table for people, and as JSON.

use std::fmt::Write;

use paged_attention::budget::{Budget, BudgetError, Lengths, MemoryConfig, MemoryModel, Parts, expected_tail_slots};
use serde::Serialize;

use super::args::BudgetArgs;
use super::{reserved, shape};
use crate::table::{columns, counted};

/// The whole report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    layers: u32,
    kv_heads: u32,
    head_dim: u32,
    element_bytes: u32,
    /// Equation 1 for one token.
    bytes_per_token: u64,
    /// Of one request.
    tokens: u64,
    /// Equation 1 for these tokens.
    total_bytes: u64,
    page_size: u32,
    lengths: String,
    mean_tokens: f64,
    longest_tokens: u32,
    /// Equations 2 and 3, per request: counted.
    mean_tail_slots: f64,
    /// Equation 3 where every remainder is equally frequent.
    expected_tail_slots: f64,
    /// Equation 2, per request.
    tail_slots_bound: u32,
    reserved_tokens: u32,
    /// Per request, in the mean.
    reserved_waste_slots: f64,
    /// Of the slots of all pages, those that hold tokens.
    used_share: f64,
    /// The same of reserved slots.
    reserved_used_share: f64,
    counted: Counted,
    memory: Option<Memory>,
    /// Files written.
    pub figures: Vec<String>,
}

/// Sums over all lengths, each counted as often as it occurs.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Counted {
    lengths: u64,
    tokens: u64,
    pages: u64,
    tail_slots: u64,
    tail_slots_bound: u64,
    reserved_waste_slots: u64,
}

/// What fits into a device's memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Memory {
    memory_bytes: u64,
    q_heads: u32,
    prefill_rows: u32,
    /// Requests that fit, in pages.
    requests: u64,
    /// The same where each reserves.
    requests_reserved: u64,
    /// What keeps out one more.
    one_more: String,
    /// Bytes that are left; negative where not even one request fits.
    free_bytes: i128,
    parts: RequestParts,
}

/// The parts of the memory of some requests: of those that fit, or of one if none does.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct RequestParts {
    requests: u64,
    /// Per layer.
    pages: u32,
    /// Of all layers.
    page_bytes: u64,
    /// What a device must bind at once.
    layer_bytes: u64,
    steady_decode: PartFigures,
    prefill_peak: PartFigures,
    needed: PartFigures,
}

/// Bytes of every part.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct PartFigures {
    weights: u64,
    activations: u64,
    workspace: u64,
    communication: u64,
    kv: u64,
    metadata: u64,
    other: u64,
    headroom: u64,
    total: u128,
}

impl From<Parts> for PartFigures {
    fn from(parts: Parts) -> Self {
        let Parts { weights, activations, workspace, communication, kv, metadata, other, headroom } = parts;
        let total = parts.total();
        Self { weights, activations, workspace, communication, kv, metadata, other, headroom, total }
    }
}

impl PartFigures {
    fn rows(&self) -> [(&'static str, u128); 9] {
        [
            ("weights", self.weights.into()),
            ("activations", self.activations.into()),
            ("workspace", self.workspace.into()),
            ("communication", self.communication.into()),
            ("KV pages", self.kv.into()),
            ("metadata", self.metadata.into()),
            ("other", self.other.into()),
            ("head-room", self.headroom.into()),
            ("all", self.total),
        ]
    }
}

impl Memory {
    /// Fits as many requests as possible.
    pub fn new(
        memory: u64,
        config: &MemoryConfig,
        lengths: &Lengths,
        paged: &MemoryModel,
        reserving: &MemoryModel,
    ) -> Result<Self, BudgetError> {
        let requests = paged.requests_in(memory);
        let one_more = match paged.budget(requests + 1) {
            Ok(budget) => {
                let more = budget.needed().total().saturating_sub(memory.into());
                format!("{} are missing for one more", size(more))
            }
            Err(error) => error.to_string(),
        };
        let budget = paged.budget(requests.max(1))?;
        Ok(Self {
            memory_bytes: memory,
            q_heads: config.attention.layout.geometry().q_heads(),
            prefill_rows: config.prefill_rows.min(lengths.longest()),
            requests,
            requests_reserved: reserving.requests_in(memory),
            one_more,
            free_bytes: i128::from(memory) - budget.needed().total() as i128,
            parts: RequestParts::new(&budget, config.layers),
        })
    }

    fn text(&self, text: &mut String) {
        let mut line = |name: &str, value: &str| {
            // Writing to a String does not fail.
            let _ = writeln!(text, "{name:<9} {value}");
        };
        let parts = &self.parts;
        line("memory", &size(self.memory_bytes));
        let answer = format!("{} in pages, {} with reservations", self.requests, self.requests_reserved);
        line("requests", &format!("{answer}; {}", self.one_more));
        line(
            "pool",
            &format!(
                "{} of {} in all layers; {} per layer",
                counted(parts.pages, "page"),
                size(parts.page_bytes),
                size(parts.layer_bytes)
            ),
        );
        let rows = counted(self.prefill_rows, "row");
        line("peak", &format!("a prompt's last {rows} while all others generate; {} query heads", self.q_heads));
        if self.free_bytes >= 0 {
            line("free", &size(self.free_bytes.unsigned_abs()));
        }
        let of = format!("of {}", counted(parts.requests, "request"));
        let head = [of.as_str(), "steady decode", "prefill peak", "needed"].map(str::to_owned);
        let all = parts.steady_decode.rows().into_iter().zip(parts.prefill_peak.rows()).zip(parts.needed.rows());
        let rows = all.map(|(((name, steady), (_, peak)), (_, needed))| {
            [name.to_owned(), size(steady), size(peak), size(needed)]
        });
        text.push('\n');
        *text += &columns(&std::iter::once(head).chain(rows).collect::<Vec<_>>());
    }
}

impl RequestParts {
    fn new(budget: &Budget, layers: u32) -> Self {
        let needed = budget.needed();
        Self {
            requests: budget.requests,
            pages: budget.pages,
            page_bytes: needed.kv / u64::from(budget.pages.max(1)),
            layer_bytes: needed.kv / u64::from(layers.max(1)),
            steady_decode: budget.steady_decode.into(),
            prefill_peak: budget.prefill_peak.into(),
            needed: needed.into(),
        }
    }
}

impl Report {
    /// Counts everything but what fits.
    pub fn new(args: &BudgetArgs, lengths: &Lengths, memory: Option<Memory>) -> Result<Self, BudgetError> {
        let shape = shape(args, args.kv_heads)?;
        let (page_size, reserved) = (args.page_size, reserved(args, lengths));
        let (tokens, tail, waste) =
            (lengths.tokens(), lengths.tail_slots(page_size), lengths.reserved_waste(reserved)?);
        let used = |unused: f64| tokens.value() / (tokens.value() + unused);
        Ok(Self {
            layers: args.layers,
            kv_heads: args.kv_heads,
            head_dim: args.head_dim,
            element_bytes: args.bytes,
            bytes_per_token: shape.bytes_per_token(),
            tokens: args.tokens,
            total_bytes: shape.total_bytes(args.tokens)?,
            page_size: page_size.get(),
            lengths: args.lengths.to_string(),
            mean_tokens: tokens.value(),
            longest_tokens: lengths.longest(),
            mean_tail_slots: tail.value(),
            expected_tail_slots: expected_tail_slots(page_size),
            tail_slots_bound: page_size.get() - 1,
            reserved_tokens: reserved,
            reserved_waste_slots: waste.value(),
            used_share: used(tail.value()),
            reserved_used_share: used(waste.value()),
            counted: Counted {
                lengths: lengths.count(),
                tokens: tokens.total(),
                pages: lengths.pages(page_size).total(),
                tail_slots: tail.total(),
                tail_slots_bound: lengths.tail_slots_bound(page_size).total(),
                reserved_waste_slots: waste.total(),
            },
            memory,
            figures: Vec::new(),
        })
    }

    /// The table.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: &str| {
            let _ = writeln!(text, "{name:<9} {value}");
        };
        line(
            "model",
            &format!(
                "{}, {}, d {}, {} per element",
                counted(self.layers, "layer"),
                counted(self.kv_heads, "KV head"),
                self.head_dim,
                counted(self.element_bytes, "byte")
            ),
        );
        line("token", &counted(self.bytes_per_token, "byte"));
        let total = counted(self.total_bytes, "byte");
        line("request", &format!("{}: {total}, {}", counted(self.tokens, "token"), in_gib(self.total_bytes)));
        let mean = format!("mean {}, longest {}", short(self.mean_tokens), self.longest_tokens);
        line("lengths", &format!("{} ({} counted): {mean}", self.lengths, self.counted.lengths));
        line(
            "pages",
            &format!(
                "of {}: {} slots of a request unused in the mean, {} at most; (B - 1) / 2 is {}; {:.1}% used",
                self.page_size,
                short(self.mean_tail_slots),
                self.tail_slots_bound,
                self.expected_tail_slots,
                100.0 * self.used_share
            ),
        );
        line(
            "reserved",
            &format!(
                "{} each: {} slots of a request unused in the mean; {:.1}% used",
                counted(self.reserved_tokens, "token"),
                short(self.reserved_waste_slots),
                100.0 * self.reserved_used_share
            ),
        );
        if let Some(memory) = &self.memory {
            memory.text(&mut text);
        }
        for figure in &self.figures {
            let _ = writeln!(text, "{:<9} {figure}", "written");
        }
        text
    }
}

/// A mean with up to three decimals.
fn short(mean: f64) -> String {
    trimmed(format!("{mean:.3}"))
}

/// A request's size in GiB, as long as three decimals say something.
fn in_gib(bytes: u64) -> String {
    let gib = bytes as f64 / (1_u64 << 30) as f64;
    if gib < 0.001 { size(bytes) } else { format!("{} GiB", short(gib)) }
}

/// A size in the largest binary unit that makes it at least 1.
fn size(bytes: impl Into<u128>) -> String {
    let bytes = bytes.into();
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, shift)| bytes >> shift > 0) {
        Some((unit, shift)) => {
            format!("{} {unit}", trimmed(format!("{:.3}", bytes as f64 / (1_u64 << shift) as f64)))
        }
        None => format!("{bytes} B"),
    }
}

/// Without zeros at the end of its decimals.
fn trimmed(number: String) -> String {
    number.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_words() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (3 << 20, "3 MiB"),
            (1 << 29, "512 MiB"),
            (24 << 30, "24 GiB"),
            (100 << 30, "100 GiB"),
            (u64::MAX, "17179869184 GiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
        assert_eq!(
            [in_gib(1 << 29), in_gib(2 << 30), in_gib(8), short(7.5), short(255.0)],
            ["0.5 GiB", "2 GiB", "8 B", "7.5", "255"]
        );
    }
}
