//! Drawing primitives in the coordinates of [`super::SIZE`], on any backend and at any scale.

use super::style::{INK, PAPER, QUIET};
use super::{Frame, SIZE};
use plotters::coord::Shift;
use plotters::drawing::DrawingArea;
use plotters::element::{Circle, PathElement, Polygon, Rectangle, Text};
use plotters::prelude::DrawingBackend;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{
    Color, FontDesc, FontFamily, FontStyle, FontTransform, RGBAColor, RGBColor, ShapeStyle, TextStyle,
};

/// Whether drawing succeeded, in the backend's words.
pub type Drawn = Result<(), String>;

/// A point.
pub type Point = (f64, f64);

/// A rectangle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Area {
    /// Left.
    pub left: f64,
    /// Top.
    pub top: f64,
    /// Right.
    pub right: f64,
    /// Bottom.
    pub bottom: f64,
}

impl Area {
    /// Width.
    pub const fn width(&self) -> f64 {
        self.right - self.left
    }

    /// Height.
    pub const fn height(&self) -> f64 {
        self.bottom - self.top
    }
}

/// How text looks and which of its points is given.
#[derive(Clone, Copy)]
pub struct Lettering {
    /// Height, px.
    pub size: f64,
    /// Colour.
    pub color: RGBColor,
    /// Bold.
    pub bold: bool,
    /// Horizontal anchor.
    pub h: HPos,
    /// Vertical anchor.
    pub v: VPos,
    /// Reads upwards.
    pub upwards: bool,
}

/// Text of a size, anchored at its left and vertical middle.
pub const fn letters(size: f64) -> Lettering {
    Lettering { size, color: INK, bold: false, h: HPos::Left, v: VPos::Center, upwards: false }
}

impl Lettering {
    /// In another colour.
    pub const fn color(mut self, color: RGBColor) -> Self {
        self.color = color;
        self
    }

    /// In bold.
    pub const fn bold(mut self) -> Self {
        self.bold = true;
        self
    }

    /// Anchored at another point.
    pub const fn at(mut self, h: HPos, v: VPos) -> Self {
        self.h = h;
        self.v = v;
        self
    }

    /// Reading upwards, anchored at its middle.
    pub const fn upwards(mut self) -> Self {
        self.upwards = true;
        self
    }
}

/// A drawing area and the scale from plot coordinates to its pixels.
pub struct Canvas<'a, DB: DrawingBackend> {
    area: &'a DrawingArea<DB, Shift>,
    scale: f64,
    drop: f64,
}

impl<'a, DB: DrawingBackend> Canvas<'a, DB> {
    /// A canvas on an area of [`SIZE`] times `scale`, with text that is vertically centred lowered by `drop` of its size.
    pub const fn new(area: &'a DrawingArea<DB, Shift>, scale: f64, drop: f64) -> Self {
        Self { area, scale, drop }
    }

    fn px(&self, (x, y): Point) -> (i32, i32) {
        ((x * self.scale).round() as i32, (y * self.scale).round() as i32)
    }

    fn stroke(&self, color: RGBAColor, width: f64) -> ShapeStyle {
        color.stroke_width((width * self.scale).round().max(1.0) as u32)
    }

    /// Paper, title, subtitle and footer.
    pub fn frame(&self, frame: &Frame) -> Drawn {
        self.area.fill(&PAPER).map_err(|e| e.to_string())?;
        self.text_within(&frame.title, (40.0, 38.0), letters(24.0).bold())?;
        self.text_within(&frame.subtitle, (40.0, 68.0), letters(15.0).color(QUIET))?;
        self.text_within(&frame.footer, (40.0, f64::from(SIZE.1) - 18.0), letters(12.0).color(QUIET))
    }

    /// Text in one line that ends before the right margin: a little smaller if need be, then cut.
    fn text_within(&self, text: &str, at: Point, lettering: Lettering) -> Drawn {
        // Lines of a file would be boxes in a PNG, and other control characters are none of XML's.
        let text = text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty());
        let mut text = text.collect::<Vec<_>>().join(" ");
        let room = f64::from(SIZE.0) - 40.0 - at.0;
        let needed = self.width(&text, lettering);
        let size = lettering.size * (room / needed.max(1.0)).clamp(0.75, 1.0);
        let lettering = Lettering { size, ..lettering };
        if self.width(&text, lettering) > room + 1.0 {
            while !text.is_empty() && self.width(&text, lettering) > room - 16.0 {
                text.pop();
            }
            text = format!("{}\u{2026}", text.trim_end());
        }
        self.text(&text, at, lettering)
    }

    /// A line through points.
    pub fn path(&self, points: &[Point], color: RGBAColor, width: f64) -> Drawn {
        let points: Vec<_> = points.iter().map(|&point| self.px(point)).collect();
        self.area.draw(&PathElement::new(points, self.stroke(color, width))).map_err(|e| e.to_string())
    }

    /// A line between two points.
    pub fn line(&self, from: Point, to: Point, color: RGBColor, width: f64) -> Drawn {
        self.path(&[from, to], color.to_rgba(), width)
    }

    /// A filled rectangle.
    pub fn fill(&self, area: Area, color: RGBAColor) -> Drawn {
        let corners = [self.px((area.left, area.top)), self.px((area.right, area.bottom))];
        self.area.draw(&Rectangle::new(corners, color.filled())).map_err(|e| e.to_string())
    }

    /// The outline of a rectangle.
    pub fn outline(&self, area: Area, color: RGBColor, width: f64) -> Drawn {
        let Area { left, top, right, bottom } = area;
        let corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)];
        self.path(&corners, color.to_rgba(), width)
    }

    /// Diagonal lines that fill a rectangle.
    pub fn hatch(&self, area: Area, color: RGBColor, spacing: f64, width: f64) -> Drawn {
        let (w, h) = (area.width(), area.height());
        let mut shift = spacing / 2.0;
        while shift < w + h {
            // The line x + y = shift, from the left or bottom edge to the top or right one.
            let from = if shift <= h { (0.0, shift) } else { (shift - h, h) };
            let to = if shift <= w { (shift, 0.0) } else { (w, shift - w) };
            self.line((area.left + from.0, area.top + from.1), (area.left + to.0, area.top + to.1), color, width)?;
            shift += spacing;
        }
        Ok(())
    }

    /// A filled polygon.
    pub fn polygon(&self, points: &[Point], color: RGBAColor) -> Drawn {
        let points: Vec<_> = points.iter().map(|&point| self.px(point)).collect();
        self.area.draw(&Polygon::new(points, color.filled())).map_err(|e| e.to_string())
    }

    /// A filled circle.
    pub fn dot(&self, at: Point, radius: f64, color: RGBColor) -> Drawn {
        let radius = (radius * self.scale).round() as i32;
        self.area.draw(&Circle::new(self.px(at), radius, color.filled())).map_err(|e| e.to_string())
    }

    /// A ring on paper.
    pub fn ring(&self, at: Point, radius: f64, color: RGBColor, width: f64) -> Drawn {
        self.dot(at, radius + width / 2.0, color)?;
        self.dot(at, radius - width / 2.0, PAPER)
    }

    fn style(&self, lettering: Lettering) -> TextStyle<'static> {
        let weight = if lettering.bold { FontStyle::Bold } else { FontStyle::Normal };
        let font = FontDesc::new(FontFamily::SansSerif, lettering.size * self.scale, weight);
        let font = if lettering.upwards { font.transform(FontTransform::Rotate270) } else { font };
        TextStyle { font, color: lettering.color.to_backend_color(), pos: Pos::new(lettering.h, lettering.v) }
    }

    /// Text.
    pub fn text(&self, text: &str, (x, y): Point, lettering: Lettering) -> Drawn {
        let drop = if matches!(lettering.v, VPos::Center) { self.drop * lettering.size } else { 0.0 };
        let at = if lettering.upwards { (x + drop, y) } else { (x, y + drop) };
        let element = Text::new(text.to_owned(), self.px(at), self.style(lettering));
        self.area.draw(&element).map_err(|e| e.to_string())
    }

    /// Width of text.
    pub fn width(&self, text: &str, lettering: Lettering) -> f64 {
        let style = self.style(Lettering { upwards: false, ..lettering });
        self.area.estimate_text_size(text, &style).map_or(0.0, |(width, _)| f64::from(width) / self.scale)
    }
}
