//! `--shape`.

use paged_attention_cases::{CaseSpec, Heads, speed, timed};

/// What one `--shape` stands for.
#[derive(Clone, Debug, PartialEq)]
pub struct Shapes(pub Vec<CaseSpec>);

/// Sequences of a batch: the plan for many more takes longer than the measuring.
const SEQS_MAX: u32 = 4096;

/// Parses one `--shape`.
pub fn parse(text: &str) -> Result<Shapes, String> {
    let named = speed();
    if text.eq_ignore_ascii_case("all") {
        return Ok(Shapes(named));
    }
    let names: Vec<&str> = named.iter().map(|spec| spec.name.as_str()).collect();
    if let Some(spec) = named.iter().find(|spec| spec.name.eq_ignore_ascii_case(text)) {
        return Ok(Shapes(vec![spec.clone()]));
    }
    if !text.contains('=') {
        return Err(format!("{}, all, or q=..,kv=..,heads=Q/KV,dim=..[,seqs=..] is needed", names.join(", ")));
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
    let (q_heads, kv_heads) = heads.ok_or("heads=Q/KV is missing")?;
    let (q, kv, dim) = (needed(q, "q")?, needed(kv, "kv")?, needed(dim, "dim")?);
    let seqs = seqs.unwrap_or(1);
    if q_heads % kv_heads != 0 {
        return Err(format!("heads={q_heads}/{kv_heads}: query heads are a multiple of KV heads"));
    }
    if q > kv {
        return Err(format!("q={q},kv={kv}: the mask is causal, so a query row needs its key"));
    }
    if seqs > SEQS_MAX {
        return Err(format!("seqs={seqs}: {SEQS_MAX} are allowed"));
    }
    Ok(Shapes(vec![timed(text, Heads::new(q_heads, kv_heads, dim), vec![(q, kv); seqs as usize])]))
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
        let [spec] = &shapes[..] else { panic!("{shapes:?}") };
        assert_eq!(spec.heads, Heads::new(9, 3, 64));
        let lengths: Vec<_> = spec.seqs.iter().map(|seq| (seq.q_len, seq.kv_len)).collect();
        assert_eq!(lengths, [(1, 77), (1, 77)]);
        assert!(spec.causal);
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
