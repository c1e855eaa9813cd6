//! The shares of the limits and the growth of times as SVG.

use std::ops::Range;

use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use super::growth::{GrowthReport, PointFigures};
use super::report::{Report, ShapeFigures};

const BAR: i32 = 22;
const LABEL_WIDTH: i32 = 330;
const SCALE_WIDTH: i32 = 480;
const TOP: i32 = 70;

/// Two bars per shape: ours and the unfused baseline, as shares of the limit that the shape runs into.
pub fn shares(report: &Report) -> Result<String, String> {
    let mut text = String::new();
    draw_shares(report, &mut text).map_err(|error| error.to_string())?;
    Ok(text)
}

fn draw_shares(report: &Report, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let rows = i32::try_from(report.shapes.len())?;
    let (width, height) = (LABEL_WIDTH + SCALE_WIDTH + 110, TOP + rows * (2 * BAR + 18) + 30);
    let root = SVGBackend::with_string(text, (u32::try_from(width)?, u32::try_from(height)?)).into_drawing_area();
    root.fill(&WHITE)?;
    let font = |size: i32| ("sans-serif", size).into_font().color(&BLACK);
    let (ours, baseline) = (RGBColor(0x1f, 0x77, 0xb4), RGBColor(0xc7, 0xc7, 0xc7));
    let at = |share: f64| LABEL_WIDTH + (share.clamp(0.0, 1.0) * f64::from(SCALE_WIDTH)).round() as i32;
    root.draw(&Text::new("Share of what the adapter can do at most", (10, 10), font(18)))?;
    let limits = format!(
        "{}, {}: multiply-adds (P), reading (D); blue: paged, grey: unfused",
        report.header.adapter.adapter, report.header.adapter.driver
    );
    root.draw(&Text::new(limits, (10, 36), font(13)))?;
    for (index, shape) in (0..).zip(&report.shapes) {
        let y = TOP + index * (2 * BAR + 18);
        let label = format!("{} {}", shape.name, shape.dtype);
        root.draw(&Text::new(label, (10, y + 4), font(15)))?;
        root.draw(&Text::new(shape.kernel.clone(), (10, y + BAR + 4), font(12)))?;
        let bars = [(Some(shape.share), ours), (ShapeFigures::unfused_share(shape), baseline)];
        for (offset, (share, color)) in [0, BAR].into_iter().zip(bars) {
            let Some(share) = share else { continue };
            let corners = [(at(0.0), y + offset), (at(share), y + offset + BAR - 2)];
            root.draw(&Rectangle::new(corners, color.filled()))?;
            root.draw(&Text::new(format!("{share:.3}"), (at(share) + 6, y + offset + 4), font(13)))?;
        }
    }
    for tenth in [0, 2, 4, 6, 8, 10] {
        let x = at(f64::from(tenth) / 10.0);
        root.draw(&PathElement::new([(x, TOP - 6), (x, height - 26)], BLACK.mix(0.25)))?;
        root.draw(&Text::new(format!("{:.1}", f64::from(tenth) / 10.0), (x - 8, height - 22), font(13)))?;
    }
    root.present()?;
    Ok(())
}

/// Two panels: prompts on logarithmic axes, single tokens on linear ones; medians, and the fitted curves.
pub fn curves(report: &GrowthReport) -> Result<String, String> {
    let mut text = String::new();
    draw_curves(report, &mut text).map_err(|error| error.to_string())?;
    Ok(text)
}

fn draw_curves(report: &GrowthReport, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(text, (960, 440)).into_drawing_area();
    root.fill(&WHITE)?;
    let (title, panels) = root.split_vertically(44);
    let adapter = &report.header.adapter;
    let heading = format!("{}, {}: medians of {} rounds", adapter.adapter, adapter.driver, report.header.rounds());
    title.draw(&Text::new(heading, (12, 14), ("sans-serif", 15).into_font()))?;
    let (left, right) = panels.split_horizontally(480);

    let prefill = &report.prefill;
    let (x, y) = ranges(&prefill.points);
    panel(
        &left,
        &format!("Prompt: tokens to the power of {:.3}", prefill.exponent),
        ((x.start / 1.3..x.end * 1.3).log_scale(), (y.start / 1.5..y.end * 1.5).log_scale()),
        &prefill.points,
        // A power is straight on these axes.
        [x.start, x.end].map(|tokens| (tokens, prefill.at_ms(tokens))),
    )?;
    let decode = &report.decode;
    let (x, y) = ranges(&decode.points);
    panel(
        &right,
        &format!("Single token: {:.0} us + {:.1} ns per key", decode.fixed_us, decode.per_key_ns),
        (0.0..x.end * 1.05, 0.0..y.end * 1.1),
        &decode.points,
        [0.0, x.end].map(|keys| (keys, decode.at_ms(keys))),
    )?;
    root.present()?;
    Ok(())
}

/// The lengths, and the milliseconds.
fn ranges(points: &[PointFigures]) -> (Range<f64>, Range<f64>) {
    let range = |value: fn(&PointFigures) -> f64| {
        let values = points.iter().map(value);
        values.fold(f64::INFINITY..0.0, |range, x| range.start.min(x)..range.end.max(x))
    };
    (range(|point| point.kv_len.into()), range(|point| point.median_ms))
}

fn panel<X, Y>(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    caption: &str,
    (x, y): (X, Y),
    points: &[PointFigures],
    line: [(f64, f64); 2],
) -> Result<(), Box<dyn std::error::Error>>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let color = RGBColor(0x1f, 0x77, 0xb4);
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 15))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(58)
        .build_cartesian_2d(x, y)?;
    let whole = |x: &f64| format!("{x}");
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("keys").y_desc("ms").x_labels(5).label_style(("sans-serif", 12)).light_line_style(TRANSPARENT);
    mesh.x_label_formatter(&whole).y_label_formatter(&whole).draw()?;
    chart.draw_series([PathElement::new(line.to_vec(), BLACK.mix(0.5))])?;
    let marks = points.iter().map(|point| Circle::new((point.kv_len.into(), point.median_ms), 4, color.filled()));
    chart.draw_series(marks)?;
    Ok(())
}
