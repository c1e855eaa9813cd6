//! Repetition of shader lines: `//each x [FIRST] COUNT` … `//end`.
//!
//! The lines between are written once for every value from FIRST (0 if left out) to COUNT - 1, with `$x` replaced by the
//! value. Blocks may nest; names are single letters; bounds are numbers or names of generated constants. Registers need
//! this: what a loop indexes, a driver may keep in memory, and loops are given counters that keep drivers from
//! unrolling them.

/// A template that does not expand. The shaders are part of the crate, so this is a fault of the crate, which its
/// tests would show.
pub(super) type TemplateError = String;

/// Expands all blocks of `text`; `constant` looks up a bound by its name.
pub(super) fn expand(text: &str, constant: &dyn Fn(&str) -> Option<u32>) -> Result<String, TemplateError> {
    let mut lines = text.lines();
    let expanded = block(&mut lines, constant, false)?;
    match lines.next() {
        None => Ok(expanded),
        Some(_) => Err("an `//end` without an `//each`".into()),
    }
}

/// Expands up to the block's end, or up to the end of the text where it is the outermost.
fn block(
    lines: &mut std::str::Lines<'_>,
    constant: &dyn Fn(&str) -> Option<u32>,
    nested: bool,
) -> Result<String, TemplateError> {
    let mut expanded = String::new();
    while let Some(line) = lines.next() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["//end"] if nested => return Ok(expanded),
            ["//end"] => return Err("an `//end` without an `//each`".into()),
            ["//each", name, bounds @ ..] => {
                let bound = |word: &&str| {
                    let value = word.parse().ok().or_else(|| constant(word));
                    value.ok_or_else(|| format!("`{line}`: {word} is not known"))
                };
                let (first, count) = match bounds {
                    [count] => (0, bound(count)?),
                    [first, count] => (bound(first)?, bound(count)?),
                    _ => return Err(format!("`{line}`: one or two bounds are needed")),
                };
                let body = block(lines, constant, true)?;
                for value in first..count {
                    expanded.push_str(&body.replace(&format!("${name}"), &value.to_string()));
                }
            }
            _ => {
                expanded.push_str(line);
                expanded.push('\n');
            }
        }
    }
    if nested { Err("an `//each` without an `//end`".into()) } else { Ok(expanded) }
}

#[cfg(test)]
mod tests {
    use super::expand;

    fn constant(name: &str) -> Option<u32> {
        (name == "TWO").then_some(2)
    }

    #[test]
    fn blocks_repeat_and_nest() {
        let text = "a\n//each r TWO\nr$r\n//each c 1 3\nq_$r_$c = $cu\n//end\n//end\nz\n";
        let expected = "a\nr0\nq_0_1 = 1u\nq_0_2 = 2u\nr1\nq_1_1 = 1u\nq_1_2 = 2u\nz\n";
        assert_eq!(expand(text, &constant).unwrap(), expected);
    }

    #[test]
    fn broken_blocks_are_refused() {
        for text in ["//each r TWO\nx\n", "x\n//end\n", "//each r THREE\n//end\n", "//each r\n//end\n"] {
            assert!(expand(text, &constant).is_err(), "{text:?}");
        }
    }
}
