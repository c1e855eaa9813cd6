//! Paired rounds over shapes, baseline and limits.

use paged_attention::Choice;

use crate::error::BenchError;
use crate::gpu::{Gpu, best, median};
use crate::limits::{FmaRate, Latency, ReadRate};
use crate::paged::{Paged, Paging, Selection};
use crate::problem::{ERROR_MAX, Problem};
use crate::unfused::Unfused;

/// How to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Rounds: an odd number, so that a median is one of them.
    pub rounds: usize,
    /// Seconds that one timing takes at least, by repeating what is shorter.
    pub target_s: f64,
    /// Which kernels.
    pub selection: Selection,
    /// Tokens per page.
    pub page_size: u32,
}

impl Options {
    /// Seven rounds of timings of 50 ms, pages of 16.
    pub const FULL: Self = Self { rounds: 7, target_s: 0.05, selection: Selection::Chosen, page_size: 16 };

    /// Three rounds of timings of 10 ms: to see that everything runs, not to quote.
    pub const QUICK: Self = Self { rounds: 3, target_s: 0.01, ..Self::FULL };
}

/// What one shape showed, a value per round.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// Seconds of the call on scattered pages.
    pub paged: Vec<f64>,
    /// Seconds of the same call on one page per sequence.
    pub contiguous: Vec<f64>,
    /// Seconds of the unfused baseline; none where it cannot run.
    pub unfused: Vec<f64>,
    /// Reading rate in 10^9 bytes per second at the size of this shape's keys and values.
    pub read_gbps: Vec<f64>,
    /// The way of reading that was the fastest in the last round.
    pub read_pattern: String,
}

/// The adapter's limits, a value per round.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Multiply-adds in registers, 10^9 operations per second.
    pub fma_gflops: Vec<f64>,
    /// Microseconds of an almost empty dispatch with submit and wait.
    pub dispatch_us: Vec<f64>,
    /// Microseconds of one of 100 such dispatches in one submit.
    pub dispatch_among_us: Vec<f64>,
}

/// One shape, checked and measured.
#[derive(Debug)]
pub struct Measured {
    /// The shape.
    pub problem: Problem,
    /// The kernels that ran.
    pub kernel: String,
    /// Milliseconds that they took to compile, whichever shape had them made.
    pub compile_ms: f64,
    /// Variants that were preferred, and why they were not taken.
    pub stepped_down: Vec<String>,
    /// How the runner chose, where it did.
    pub choice: Option<Choice>,
    /// Largest distance from float64: paged, contiguous, and unfused where it ran.
    pub errors: Vec<(&'static str, f64)>,
    /// Output rows that were compared, and that there are.
    pub coverage: (usize, usize),
    /// Why there is no baseline.
    pub no_unfused: Option<String>,
    /// What was measured.
    pub series: Series,
}

impl Measured {
    /// Median of the paged call's times.
    pub fn median_s(&self) -> f64 {
        median(&self.series.paged)
    }

    /// Least of the paged call's times.
    pub fn best_s(&self) -> f64 {
        best(&self.series.paged)
    }

    /// 10^9 operations per second at the median.
    pub fn gflops(&self) -> f64 {
        1e-9 * self.problem.flop() / self.median_s()
    }

    /// 10^9 bytes of keys and values per second at the median.
    pub fn kv_gbps(&self) -> f64 {
        1e-9 * self.problem.kv_bytes() / self.median_s()
    }

    /// The best reading rate.
    pub fn read_gbps(&self) -> f64 {
        self.series.read_gbps.iter().copied().fold(0.0, f64::max)
    }

    /// The limit that this shape runs into: best over best, of the multiply-add rate or, for a decode, of reading.
    pub fn share(&self, limits: &Limits) -> f64 {
        if self.problem.decodes() {
            1e-9 * self.problem.kv_bytes() / self.best_s() / self.read_gbps()
        } else {
            1e-9 * self.problem.flop() / self.best_s() / limits.fma_best()
        }
    }

    /// Median of the rounds' ratios of times on scattered pages to times on contiguous ones.
    pub fn paged_over_contiguous(&self) -> f64 {
        median(&ratios(&self.series.paged, &self.series.contiguous))
    }

    /// Median of the rounds' ratios of the baseline's times to ours.
    pub fn unfused_over_this(&self) -> Option<f64> {
        let ratios = ratios(&self.series.unfused, &self.series.paged);
        (!ratios.is_empty()).then(|| median(&ratios))
    }
}

impl Limits {
    /// The best multiply-add rate.
    pub fn fma_best(&self) -> f64 {
        self.fma_gflops.iter().copied().fold(0.0, f64::max)
    }
}

fn ratios(over: &[f64], under: &[f64]) -> Vec<f64> {
    over.iter().zip(under).map(|(over, under)| over / under).collect()
}

struct Timed {
    measured: Measured,
    paged: Paged,
    contiguous: Paged,
    unfused: Option<Unfused>,
    read: ReadRate,
    repeats: [u32; 3],
    /// Bits of the checked output, to be compared once more at the end.
    out: Vec<u32>,
}

/// Shapes that were checked and are ready for rounds.
pub struct Session {
    options: Options,
    fma: FmaRate,
    latency: Latency,
    limits: Limits,
    shapes: Vec<Timed>,
}

impl Session {
    /// Steps that [`Session::new`] and [`Session::run`] report for so many shapes.
    pub fn steps(shapes: usize, options: &Options) -> usize {
        1 + shapes + options.rounds * (1 + shapes)
    }

    /// Prepares every shape and compares every result with float64. `step` hears what is about to be done.
    ///
    /// # Errors
    /// [`BenchError`], of the first shape that is wrong or cannot be run.
    pub fn new(
        gpu: &mut Gpu,
        problems: Vec<Problem>,
        options: Options,
        step: &mut dyn FnMut(&str),
    ) -> Result<Self, BenchError> {
        step("limits");
        let fma = FmaRate::new(gpu, options.target_s)?;
        let latency = Latency::new(gpu)?;
        let mut shapes = Vec::new();
        for problem in problems {
            step(&format!("checking {}", problem.name));
            shapes.push(prepare(gpu, problem, &options)?);
        }
        Ok(Self { options, fma, latency, limits: Limits::default(), shapes })
    }

    /// All rounds. Every other one goes through the shapes and their contenders backwards.
    ///
    /// # Errors
    /// [`BenchError::Device`]; [`BenchError::Wrong`] where an output changed while it was being timed.
    pub fn run(mut self, gpu: &Gpu, step: &mut dyn FnMut(&str)) -> Result<(Limits, Vec<Measured>), BenchError> {
        let rounds = self.options.rounds;
        for round in 0..rounds {
            step(&format!("round {} of {rounds}, limits", round + 1));
            self.limits.fma_gflops.push(self.fma.gflops(gpu)?);
            self.limits.dispatch_us.push(self.latency.dispatch_us(gpu, 1)?);
            self.limits.dispatch_among_us.push(self.latency.dispatch_us(gpu, 100)?);
            let backwards = round % 2 == 1;
            let mut order: Vec<&mut Timed> = self.shapes.iter_mut().collect();
            if backwards {
                order.reverse();
            }
            for shape in order {
                step(&format!("round {} of {rounds}, {}", round + 1, shape.measured.problem.name));
                shape.round(gpu, backwards)?;
            }
        }
        for shape in &self.shapes {
            if gpu.read::<u32>(&shape.paged.out)? != shape.out {
                return Err(BenchError::Device(format!(
                    "{}: the output is not the one that was checked",
                    shape.measured.problem.name
                )));
            }
        }
        Ok((self.limits, self.shapes.into_iter().map(|shape| shape.measured).collect()))
    }
}

impl Timed {
    fn round(&mut self, gpu: &Gpu, backwards: bool) -> Result<(), BenchError> {
        let mut order = [0, 1, 2, 3];
        if backwards {
            order.reverse();
        }
        let [paged, contiguous, unfused] = self.repeats;
        let timed = |record: &dyn Fn(&mut wgpu::CommandEncoder), repeats: u32| -> Result<f64, BenchError> {
            Ok(gpu.seconds(record, repeats)? / f64::from(repeats))
        };
        let series = &mut self.measured.series;
        for contender in order {
            match contender {
                0 => series.paged.push(timed(&|encoder| self.paged.encode(encoder), paged)?),
                1 => series.contiguous.push(timed(&|encoder| self.contiguous.encode(encoder), contiguous)?),
                2 => {
                    if let Some(baseline) = &self.unfused {
                        series.unfused.push(timed(&|encoder| baseline.encode(encoder), unfused)?);
                    }
                }
                _ => {
                    let (rate, pattern) = self.read.gbps(gpu)?;
                    series.read_gbps.push(rate);
                    series.read_pattern = pattern.to_owned();
                }
            }
        }
        Ok(())
    }
}

fn prepare(gpu: &mut Gpu, problem: Problem, options: &Options) -> Result<Timed, BenchError> {
    let reference = problem.reference();
    let paged = Paged::new(gpu, &problem, Paging::Scattered(options.page_size), options.selection)?;
    let contiguous = Paged::new(gpu, &problem, Paging::Contiguous, options.selection)?;
    let (unfused, no_unfused) = match Unfused::new(gpu, &problem) {
        Ok(unfused) => (Some(unfused), None),
        Err(BenchError::Shape { why, .. }) => (None, Some(why)),
        Err(error) => return Err(error),
    };
    let mut errors = Vec::new();
    let mut repeats = [1; 3];
    type Encode<'a> = Box<dyn Fn(&mut wgpu::CommandEncoder) + 'a>;
    let contenders: [Option<(&'static str, Encode<'_>, &wgpu::Buffer)>; 3] = [
        Some(("paged", Box::new(|encoder: &mut _| paged.encode(encoder)), &paged.out)),
        Some(("contiguous", Box::new(|encoder: &mut _| contiguous.encode(encoder)), &contiguous.out)),
        unfused.as_ref().map(|unfused| {
            let encode: Encode<'_> = Box::new(|encoder: &mut _| unfused.encode(encoder));
            ("unfused", encode, &unfused.out)
        }),
    ];
    for (contender, repeats) in contenders.iter().zip(&mut repeats) {
        let Some((contender, encode, out)) = contender else { continue };
        *repeats = gpu.repeats(&**encode, options.target_s)?;
        let error = reference.largest_error(&gpu.read(out)?);
        if error > ERROR_MAX {
            return Err(BenchError::Wrong { name: problem.name.clone(), contender, error, allowed: ERROR_MAX });
        }
        errors.push((*contender, error));
    }
    drop(contenders);
    let read = ReadRate::new(gpu, problem.kv_bytes(), options.target_s)?;
    let out = gpu.read(&paged.out)?;
    let measured = Measured {
        kernel: paged.kernel.clone(),
        compile_ms: paged.compile_ms,
        stepped_down: paged.stepped_down.clone(),
        choice: paged.choice.clone(),
        errors,
        coverage: reference.coverage(),
        no_unfused,
        series: Series::default(),
        problem,
    };
    Ok(Timed { measured, paged, contiguous, unfused, read, repeats, out })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is published follows from the rounds: ratios inside a round, shares best over best.
    #[test]
    fn figures_from_rounds() {
        let problem = Problem::new("x", (1, 1), (8, 8), true, &[(2, 2)], paged_attention::Dtype::F32).unwrap();
        let (flop, bytes) = (problem.flop(), problem.kv_bytes());
        let series = Series {
            paged: vec![1.0, 2.0, 4.0],
            contiguous: vec![1.0, 1.0, 4.0],
            unfused: vec![3.0, 8.0, 8.0],
            read_gbps: vec![1.0, 5.0, 2.0],
            read_pattern: String::new(),
        };
        let mut measured = Measured {
            problem,
            kernel: String::new(),
            compile_ms: 0.0,
            stepped_down: Vec::new(),
            choice: None,
            errors: Vec::new(),
            coverage: (2, 2),
            no_unfused: None,
            series,
        };
        let limits = Limits { fma_gflops: vec![3.0, 10.0], ..Limits::default() };
        assert_eq!((measured.median_s(), measured.best_s()), (2.0, 1.0));
        assert_eq!((measured.paged_over_contiguous(), measured.unfused_over_this()), (1.0, Some(3.0)));
        assert_eq!(measured.gflops(), 1e-9 * flop / 2.0);
        assert_eq!(measured.share(&limits), 1e-9 * flop / 1.0 / 10.0);
        measured.problem.lengths = vec![(1, 2)];
        assert_eq!(measured.share(&limits), 1e-9 * bytes / 1.0 / 5.0);
        measured.series.unfused.clear();
        assert_eq!(measured.unfused_over_this(), None);
    }
}
