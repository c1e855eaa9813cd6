//! `--shape`.

use paged_attention_bench_kit::{BenchError, NAMES, Problem};

use super::args::BenchDtype;

/// A shape to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One of the named ones.
    Named(&'static str),
    /// One of the user's own.
    Custom(Custom),
}

/// `q=..,kv=..,heads=Q/KV,dim=..`, and `seqs=..`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Custom {
    /// As it was written.
    name: String,
    q: u32,
    kv: u32,
    heads: (u32, u32),
    dim: u32,
    seqs: u32,
}

/// What one `--shape` stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shapes(pub Vec<Shape>);

impl Shape {
    /// As reports call it.
    pub fn name(&self) -> &str {
        match self {
            Self::Named(name) => name,
            Self::Custom(custom) => &custom.name,
        }
    }

    /// Its tensors.
    pub fn problem(&self, dtype: BenchDtype) -> Result<Problem, BenchError> {
        match self {
            Self::Named(name) => Problem::named(name, dtype.into()),
            Self::Custom(Custom { name, q, kv, heads, dim, seqs }) => {
                let lengths = vec![(*q, *kv); *seqs as usize];
                Problem::new(name, *heads, (*dim, *dim), true, &lengths, dtype.into())
            }
        }
    }
}

/// Sequences of a batch: the plan for many more takes longer than the measuring.
const SEQS_MAX: u32 = 4096;

/// Parses one `--shape`.
pub fn parse(text: &str) -> Result<Shapes, String> {
    if text.eq_ignore_ascii_case("all") {
        return Ok(Shapes(NAMES.map(Shape::Named).to_vec()));
    }
    if let Some(name) = NAMES.iter().find(|name| name.eq_ignore_ascii_case(text)) {
        return Ok(Shapes(vec![Shape::Named(name)]));
    }
    if !text.contains('=') {
        return Err(format!("{}, all, or q=..,kv=..,heads=Q/KV,dim=..[,seqs=..] is needed", NAMES.join(", ")));
    }
    let (mut q, mut kv, mut heads, mut dim, mut seqs) = (None, None, None, None, None);
    for part in text.split(',') {
        let (key, value) = part.split_once('=').ok_or_else(|| format!("`{part}` is not KEY=VALUE"))?;
        let place = match key.trim() {
            "q" => &mut q,
            "kv" => &mut kv,
            "dim" => &mut dim,
            "seqs" => &mut seqs,
            "heads" => {
                let (q_heads, kv_heads) =
                    value.split_once('/').ok_or_else(|| format!("heads={value}: two numbers, Q/KV, are needed"))?;
                set(&mut heads, key, (number(key, q_heads)?, number(key, kv_heads)?))?;
                continue;
            }
            other => return Err(format!("`{other}` is unknown; q, kv, heads, dim and seqs are known")),
        };
        set(place, key, number(key, value)?)?;
    }
    let needed = |value: Option<u32>, key: &str| value.ok_or_else(|| format!("{key}=.. is missing"));
    let heads = heads.ok_or("heads=Q/KV is missing")?;
    let (q, kv, dim) = (needed(q, "q")?, needed(kv, "kv")?, needed(dim, "dim")?);
    let seqs = seqs.unwrap_or(1);
    if heads.0 % heads.1 != 0 {
        return Err(format!("heads={}/{}: query heads are a multiple of KV heads", heads.0, heads.1));
    }
    if q > kv {
        return Err(format!("q={q},kv={kv}: the mask is causal, so a query row needs its key"));
    }
    if seqs > SEQS_MAX {
        return Err(format!("seqs={seqs}: {SEQS_MAX} are allowed"));
    }
    Ok(Shapes(vec![Shape::Custom(Custom { name: text.to_owned(), q, kv, heads, dim, seqs })]))
}

fn number(key: &str, text: &str) -> Result<u32, String> {
    match text.trim().parse() {
        Ok(0) | Err(_) => Err(format!("{key}={text}: a whole number from 1 is needed")),
        Ok(number) => Ok(number),
    }
}

fn set<T>(place: &mut Option<T>, key: &str, value: T) -> Result<(), String> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(format!("{key} is given twice")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn custom_shapes() {
        let Shapes(shapes) = parse("heads=9/3, q=1,kv=77,dim=64,seqs=2").unwrap();
        let problem = shapes[0].problem(BenchDtype::F16).unwrap();
        assert_eq!(shapes.len(), 1);
        assert_eq!((problem.q_heads, problem.kv_heads, problem.head_dim), (9, 3, 64));
        assert_eq!(problem.lengths, [(1, 77), (1, 77)]);
        assert!(problem.decodes());
    }

    #[test]
    fn refused_shapes() {
        for (text, says) in [
            ("P9", "P1, P2"),
            ("q=1,kv=2,dim=8", "heads=Q/KV is missing"),
            ("kv=2,dim=8,heads=1/1", "q=.. is missing"),
            ("q=1,kv=2,dim=8,heads=3/2", "multiple"),
            ("q=1,kv=2,dim=8,heads=3", "Q/KV"),
            ("q=1,kv=2,dim=8,heads=3/0", "from 1"),
            ("q=0,kv=2,dim=8,heads=1/1", "from 1"),
            ("q=-1,kv=2,dim=8,heads=1/1", "from 1"),
            ("q=1,q=1,kv=2,dim=8,heads=1/1", "twice"),
            ("q=3,kv=2,dim=8,heads=1/1", "causal"),
            ("q=1,kv=2,dim=8,heads=1/1,seqs=99999", "allowed"),
            ("q=1,kv=2,d=8,heads=1/1", "unknown"),
            ("q=1,kv", "KEY=VALUE"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
