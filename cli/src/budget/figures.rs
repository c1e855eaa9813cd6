//! `--figures`: two figures, each as SVG and as the numbers behind it.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use paged_attention::PageSize;
use paged_attention::budget::{Lengths, expected_tail_slots};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::args::BudgetArgs;
use super::{Unusable, reserved, shape};
use crate::output;
use crate::table::counted;

/// Files that are written.
const NAMES: [&str; 4] = ["kv-gib.svg", "kv-gib.csv", "tail-waste.svg", "tail-waste.csv"];

/// Points of a line of [`kv`].
const STEPS: u64 = 32;

/// Page sizes of [`tails`] go at least so far.
const PAGE_SIZE_MAX: u32 = 512;

const SIZE: (u32, u32) = (760, 480);

const COLORS: [RGBColor; 5] = [
    RGBColor(0x1f, 0x77, 0xb4),
    RGBColor(0xff, 0x7f, 0x0e),
    RGBColor(0x2c, 0xa0, 0x2c),
    RGBColor(0xd6, 0x27, 0x28),
    RGBColor(0x94, 0x67, 0xbd),
];

type DrawError = Box<dyn std::error::Error>;

/// Makes both figures, then writes them; the paths come back.
pub fn write(folder: &Path, args: &BudgetArgs, lengths: &Lengths) -> Result<Vec<String>, Unusable> {
    let refuse = |message: String| Unusable::Figures { folder: folder.to_owned(), message };
    if folder.exists() && !folder.is_dir() {
        return Err(refuse("found a file; a folder is needed".to_owned()));
    }
    if let Some(name) = NAMES.into_iter().find(|name| folder.join(name).is_dir()) {
        return Err(refuse(format!("{name}: found a folder; a new or an ordinary file is needed")));
    }
    let (kv, tails) = (kv(args)?, tails(args, lengths)?);
    let drawn = |draw: &dyn Fn(&Canvas<'_>) -> Result<(), DrawError>| {
        svg(draw).map_err(|error| refuse(format!("the figure cannot be drawn: {error}")))
    };
    let files = [
        drawn(&|canvas| draw_kv(canvas, args, &kv))?,
        kv_csv(&kv),
        drawn(&|canvas| draw_tails(canvas, args, &tails))?,
        tails_csv(&tails),
    ];
    let mut written = Vec::new();
    for (name, text) in NAMES.into_iter().zip(files) {
        let place = folder.join(name);
        output::replace(&place, text.as_bytes()).map_err(|error| refuse(format!("{name}: {error}")))?;
        written.push(place.display().to_string());
    }
    Ok(written)
}

/// A line of the first figure: tokens and bytes for a number of KV heads.
struct KvLine {
    kv_heads: u32,
    points: Vec<(u64, u64)>,
}

impl KvLine {
    /// Where the line begins and ends: SVG's coordinates are whole, and points between would make it wave.
    fn ends(&self) -> impl Iterator<Item = (f64, f64)> {
        let ends = self.points.first().into_iter().chain(self.points.last());
        ends.map(|(tokens, bytes)| (*tokens as f64, gib(*bytes)))
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1_u64 << 30) as f64
}

/// Equation 1 up to the request's tokens: the model's KV heads, and a half, a quarter, twice and four times as many.
fn kv(args: &BudgetArgs) -> Result<Vec<KvLine>, Unusable> {
    let heads = args.kv_heads;
    let fewer = [4, 2].into_iter().filter(|part| heads.is_multiple_of(*part)).map(|part| heads / part);
    let more = [1, 2, 4].into_iter().filter_map(|times| heads.checked_mul(times));
    let steps: BTreeSet<u64> =
        (0..=STEPS).map(|step| (u128::from(args.tokens) * u128::from(step) / u128::from(STEPS)) as u64).collect();
    fewer
        .chain(more)
        .map(|kv_heads| {
            let shape = shape(args, kv_heads)?;
            let points = steps.iter().map(|tokens| Ok((*tokens, shape.total_bytes(*tokens)?)));
            Ok(KvLine { kv_heads, points: points.collect::<Result<_, Unusable>>()? })
        })
        .collect()
}

fn kv_csv(lines: &[KvLine]) -> String {
    let mut text = "kv_heads,tokens,bytes,gib\n".to_owned();
    for KvLine { kv_heads, points } in lines {
        for (tokens, bytes) in points {
            // Writing to a String does not fail.
            let _ = writeln!(text, "{kv_heads},{tokens},{bytes},{}", gib(*bytes));
        }
    }
    text
}

/// Unused slots of a request in the mean, for a page size.
struct TailPoint {
    page_size: u32,
    mean: f64,
    expected: f64,
    reserved: f64,
    /// The sums behind the means.
    totals: [u64; 3],
}

/// Equations 2 and 3 for powers of two and for the page size at hand, beside what a reservation leaves unused.
fn tails(args: &BudgetArgs, lengths: &Lengths) -> Result<Vec<TailPoint>, Unusable> {
    let waste = lengths.reserved_waste(reserved(args, lengths))?;
    let last = PAGE_SIZE_MAX.max(args.page_size.get());
    let powers = (0..u32::BITS).map(|power| 1 << power).take_while(|size| *size <= last);
    let sizes: BTreeSet<u32> = powers.chain([args.page_size.get()]).collect();
    // None of them is 0.
    let sizes = sizes.into_iter().filter_map(|size| PageSize::new(size).ok());
    Ok(sizes
        .map(|size| {
            let tail = lengths.tail_slots(size);
            TailPoint {
                page_size: size.get(),
                mean: tail.value(),
                expected: expected_tail_slots(size),
                reserved: waste.value(),
                totals: [tail.count(), tail.total(), waste.total()],
            }
        })
        .collect())
}

fn tails_csv(points: &[TailPoint]) -> String {
    let head = "page_size,mean_tail_slots,expected_tail_slots,tail_slots_bound,reserved_waste_slots";
    let mut text = format!("{head},lengths,tail_slots,reserved_slots\n");
    for TailPoint { page_size, mean, expected, reserved, totals: [lengths, tail, waste] } in points {
        let bound = page_size - 1;
        let _ = writeln!(text, "{page_size},{mean},{expected},{bound},{reserved},{lengths},{tail},{waste}");
    }
    text
}

/// What a line shows of its points.
type Value = fn(&TailPoint) -> f64;

type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn svg(draw: &dyn Fn(&Canvas<'_>) -> Result<(), DrawError>) -> Result<String, DrawError> {
    let mut text = String::new();
    {
        let canvas = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        canvas.fill(&WHITE)?;
        draw(&canvas)?;
        canvas.present()?;
    }
    Ok(text)
}

fn draw_kv(canvas: &Canvas<'_>, args: &BudgetArgs, lines: &[KvLine]) -> Result<(), DrawError> {
    let top = lines.iter().flat_map(KvLine::ends).map(|(_, gib)| gib).fold(0.0, f64::max);
    let (layers, bytes) = (counted(args.layers, "layer"), counted(args.bytes, "byte"));
    let title = format!("Keys and values: {layers}, d {}, {bytes} per element", args.head_dim);
    let mut chart = ChartBuilder::on(canvas)
        .caption(title, ("sans-serif", 18))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..args.tokens as f64, 0.0..1.05 * top)?;
    chart
        .configure_mesh()
        .max_light_lines(0)
        .x_desc("tokens")
        .y_desc("GiB")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .draw()?;
    for (line, color) in lines.iter().zip(COLORS) {
        let name = counted(line.kv_heads, "KV head");
        chart
            .draw_series(LineSeries::new(line.ends(), color.stroke_width(2)))?
            .label(name)
            .legend(key(color.stroke_width(2)));
    }
    legend(&mut chart, SeriesLabelPosition::UpperLeft)
}

fn draw_tails(canvas: &Canvas<'_>, args: &BudgetArgs, points: &[TailPoint]) -> Result<(), DrawError> {
    let last = points.last().map_or(1, |point| point.page_size);
    let top = points.iter().flat_map(|point| [point.mean, point.expected, point.reserved]).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(canvas)
        .caption(format!("Unused slots of a request, lengths {}", args.lengths), ("sans-serif", 18))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d((1_u32..last.max(2)).log_scale().base(2.0), 0.0..1.05 * top)?;
    chart.configure_mesh().max_light_lines(0).x_desc("tokens per page").y_desc("slots in the mean").draw()?;
    let [blue, orange, ..] = COLORS;
    // What is counted lies on what is expected, where the lengths are that even.
    let lines: [(&str, ShapeStyle, Value); 3] = [
        ("(B - 1) / 2", BLACK.mix(0.2).stroke_width(7), |point| point.expected),
        ("in pages, counted", blue.stroke_width(2), |point| point.mean),
        ("reserved", orange.stroke_width(2), |point| point.reserved),
    ];
    for (name, style, value) in lines {
        let line = points.iter().map(|point| (point.page_size, value(point)));
        chart.draw_series(LineSeries::new(line, style))?.label(name).legend(key(style));
    }
    let dots = points.iter().map(|point| Circle::new((point.page_size, point.mean), 3, blue.filled()));
    chart.draw_series(dots)?;
    legend(&mut chart, SeriesLabelPosition::MiddleLeft)
}

/// The line beside a name.
fn key(style: ShapeStyle) -> impl Fn((i32, i32)) -> PathElement<(i32, i32)> {
    move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style)
}

fn legend<'a, X: Ranged, Y: Ranged>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>,
    place: SeriesLabelPosition,
) -> Result<(), DrawError> {
    chart
        .configure_series_labels()
        .position(place)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}
