//! The shares of the limits as SVG.

use plotters::prelude::*;

use super::report::{Report, ShapeFigures};

const BAR: i32 = 22;
const LABEL_WIDTH: i32 = 330;
const SCALE_WIDTH: i32 = 480;
const TOP: i32 = 70;

/// Two bars per shape: ours and the unfused baseline, as shares of the limit that the shape runs into.
pub fn svg(report: &Report) -> Result<String, String> {
    let mut text = String::new();
    draw(report, &mut text).map_err(|error| error.to_string())?;
    Ok(text)
}

fn draw(report: &Report, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
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
        report.adapter.adapter, report.adapter.driver
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
