//! Repetition and choice of shader lines.
//!
//! - `//each x [FIRST] COUNT` … `//end`: the lines between are written once for every value from FIRST (0 if left out)
//!   to COUNT - 1, with `$x` replaced by the value.
//! - `//if NAME` … `//else` … `//end`: the lines up to `//else` (which may be left out) where NAME is not 0, the others
//!   where it is.
//! - `${a * B + c / D}`: a number; operations go strictly from left to right.
//!
//! Blocks may nest. Names of loops are single letters; other names are generated constants. Registers need this: what a
//! loop indexes, a driver may keep in memory, and loops are given counters that keep drivers from unrolling them.

use std::str::Lines;

/// What is wrong with a template. The shaders are part of the crate, so this is a fault of the crate, which its tests
/// would show.
pub(super) type TemplateError = String;

/// Expands all blocks of `text`; `constant` looks up a constant by its name.
pub(super) fn expand(text: &str, constant: &dyn Fn(&str) -> Option<u32>) -> Result<String, TemplateError> {
    let mut expanded = String::new();
    write(&parse(&mut text.lines(), None)?.0, &mut Vec::new(), constant, &mut expanded)?;
    Ok(expanded)
}

enum Node<'a> {
    Line(&'a str),
    Each { name: &'a str, first: &'a str, count: &'a str, body: Vec<Node<'a>> },
    If { name: &'a str, then: Vec<Node<'a>>, otherwise: Vec<Node<'a>> },
}

/// What ended a block.
#[derive(PartialEq)]
enum Close {
    Text,
    Else,
    End,
}

/// Nodes up to the end of the block that `open` began, or of the text where that is `None`.
fn parse<'a>(lines: &mut Lines<'a>, open: Option<&'a str>) -> Result<(Vec<Node<'a>>, Close), TemplateError> {
    let mut nodes = Vec::new();
    while let Some(line) = lines.next() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["//end"] if open.is_some() => return Ok((nodes, Close::End)),
            ["//else"] if open.is_some() => return Ok((nodes, Close::Else)),
            ["//end" | "//else"] => return Err(format!("`{line}` without a beginning")),
            ["//each", name, bounds @ ..] => {
                let (first, count) = match bounds {
                    [count] => ("0", *count),
                    [first, count] => (*first, *count),
                    _ => return Err(format!("`{line}`: one or two bounds are needed")),
                };
                let (body, end) = parse(lines, Some(line))?;
                if end == Close::Else {
                    return Err(format!("`{line}` has an `//else`"));
                }
                nodes.push(Node::Each { name, first, count, body });
            }
            ["//if", name] => {
                let (then, end) = parse(lines, Some(line))?;
                let otherwise = if end == Close::Else { parse(lines, Some(line))?.0 } else { Vec::new() };
                nodes.push(Node::If { name, then, otherwise });
            }
            _ => nodes.push(Node::Line(line)),
        }
    }
    match open {
        None => Ok((nodes, Close::Text)),
        Some(line) => Err(format!("`{line}` without an end")),
    }
}

/// Values of the loops around.
type Loops<'a> = Vec<(&'a str, u32)>;

fn write<'a>(
    nodes: &[Node<'a>],
    loops: &mut Loops<'a>,
    constant: &dyn Fn(&str) -> Option<u32>,
    out: &mut String,
) -> Result<(), TemplateError> {
    for node in nodes {
        match node {
            Node::Line(line) => {
                out.push_str(&substituted(line, loops, constant)?);
                out.push('\n');
            }
            Node::Each { name, first, count, body } => {
                for value in term(first, loops, constant)?..term(count, loops, constant)? {
                    loops.push((name, value));
                    write(body, loops, constant, out)?;
                    loops.pop();
                }
            }
            Node::If { name, then, otherwise } => {
                let chosen = if term(name, loops, constant)? != 0 { then } else { otherwise };
                write(chosen, loops, constant, out)?;
            }
        }
    }
    Ok(())
}

fn substituted(line: &str, loops: &Loops<'_>, constant: &dyn Fn(&str) -> Option<u32>) -> Result<String, TemplateError> {
    let mut text = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("${") {
        let (expression, after) = after.split_once('}').ok_or_else(|| format!("`{line}`: `${{` without `}}`"))?;
        text.push_str(before);
        text.push_str(&evaluated(expression, loops, constant)?.to_string());
        rest = after;
    }
    text.push_str(rest);
    for (name, value) in loops {
        text = text.replace(&format!("${name}"), &value.to_string());
    }
    Ok(text)
}

fn evaluated(
    expression: &str,
    loops: &Loops<'_>,
    constant: &dyn Fn(&str) -> Option<u32>,
) -> Result<u32, TemplateError> {
    let mut words = expression.split_whitespace();
    let mut value = term(words.next().unwrap_or_default(), loops, constant)?;
    while let Some(operator) = words.next() {
        let operand = term(words.next().unwrap_or_default(), loops, constant)?;
        let result = match operator {
            "+" => value.checked_add(operand),
            "-" => value.checked_sub(operand),
            "*" => value.checked_mul(operand),
            "/" => value.checked_div(operand),
            "%" => value.checked_rem(operand),
            _ => None,
        };
        value = result.ok_or_else(|| format!("`{expression}`: {value} {operator} {operand} is not a number"))?;
    }
    Ok(value)
}

fn term(word: &str, loops: &Loops<'_>, constant: &dyn Fn(&str) -> Option<u32>) -> Result<u32, TemplateError> {
    let looped = || loops.iter().find(|(name, _)| *name == word).map(|(_, value)| *value);
    word.parse().ok().or_else(looped).or_else(|| constant(word)).ok_or_else(|| format!("{word:?} is not known"))
}

#[cfg(test)]
mod tests {
    use super::expand;

    fn constant(name: &str) -> Option<u32> {
        match name {
            "TWO" => Some(2),
            "ZERO" => Some(0),
            _ => None,
        }
    }

    #[test]
    fn blocks_repeat_and_nest() {
        let text = "a\n//each r TWO\nr$r\n//each c 1 3\nq_$r_$c = $cu\n//end\n//end\nz\n";
        let expected = "a\nr0\nq_0_1 = 1u\nq_0_2 = 2u\nr1\nq_1_1 = 1u\nq_1_2 = 2u\nz\n";
        assert_eq!(expand(text, &constant).unwrap(), expected);
    }

    #[test]
    fn choices_take_one_side() {
        let text = "//each r TWO\n//if r\nlater\n//else\nfirst\n//end\n//if ZERO\nnever\n//end\n//end\n";
        assert_eq!(expand(text, &constant).unwrap(), "first\nlater\n");
    }

    #[test]
    fn expressions_go_from_left_to_right() {
        let text = "//each r 1 TWO\nx${r + 4 * TWO % 7}y${1 - r}\n//end\n";
        assert_eq!(expand(text, &constant).unwrap(), "x3y0\n");
    }

    #[test]
    fn broken_templates_are_refused() {
        for text in [
            "//each r TWO\nx\n",
            "x\n//end\n",
            "//else\n",
            "//each r THREE\n//end\n",
            "//each r\n//end\n",
            "//each r TWO\n//else\n//end\n",
            "//if THREE\n//end\n",
            "${1 - TWO}\n",
            "${1 / ZERO}\n",
            "${1 +}\n",
            "${1\n",
        ] {
            assert!(expand(text, &constant).is_err(), "{text:?}");
        }
    }
}
