#!/usr/bin/env bash
# The runs of docs/findings.md. An interrupted run continues where it stopped: about fifteen hours on two cores in all.
#
#   benchmarks/findings.sh sketch|decathlon|ablation-flowers|ablation-gtsrb DATA [OPTIONS…]
#
# DATA holds sketch-mini and decathlon-mini (a folder of images for each domain, in the benchmarks' layouts) and, beside
# it, weights/resnet18-tinyimagenet-64.safetensors. More options go to `polymask benchmark`, such as --workers 2.
set -euo pipefail
run=$1 data=$2
shift 2

main=classifier-only,finetune,affine-full,piggyback-bn,affine-simple,bitdelta,lora-conv,parallel-adapter
ours=affine-centred
bits=affine-coarse:bits=0.5,affine-coarse:bits=0.25,affine-coarse:bits=0.1,affine-coarse:bits=0.03
bits=$bits,lora-conv:rank=1,lora-conv:rank=16
shared=tall-mask,emr
today=bitdelta-row,dora,vera,ssf,bitfit,taps,ftn,tsa
rest=bn-only,piggyback,series-adapter,covnorm,dan,ba2,packnet,spottune
rows=piggyback,piggyback-star,piggyback-star-bn,piggyback-star-bn-k1,affine-simple-no-k1,affine-simple
rows=$rows,affine-simple-sigmoid,affine-full-no-k1,affine-full-no-k2,affine-full,affine-full-sigmoid,affine-full-channel
rows=$rows,affine-full:k0=learned

# One ladder for whole weights and masks, one for what learns faster, one for a head alone. The rates of
# `main`, `ours` and `shared` are searched on two domains, those of the others on one; `rest` and `bits` have one seed.
tune=(--tune rate=1e-4,3e-4,1e-3,3e-3 classifier-only:head_rate=1e-3,2e-3,5e-3,1e-2)
for method in lora-conv parallel-adapter; do
    tune+=("$method:rate=3e-4,1e-3,3e-3,1e-2")
done
# The groups `shared`, `today` and `rest` have two rates each: those around what the main group's search chose for
# methods of the same kind, and larger ones for methods that learn a few numbers a layer.
for method in series-adapter covnorm bn-only dan; do
    tune+=("$method:rate=1e-3,3e-3")
done
for method in piggyback ba2 packnet spottune bitdelta-row tall-mask emr taps; do
    tune+=("$method:rate=1e-4,3e-4")
done
for method in dora ftn tsa; do
    tune+=("$method:rate=1e-3,3e-3")
done
for method in vera ssf bitfit; do
    tune+=("$method:rate=3e-3,1e-2")
done

# RECIPE=standard: as `learn` does it by default, into folders of their own. Heads begin centred and are fitted again, and
# the best epoch is kept, both by val, which is held out. Three rates a method (four for affine-centred, affine-simple and lora-conv,
# five for piggyback-bn, whose best was at the end of three before), around those that the searches with `quick` chose. The
# group `today` has three rates or four: more of them where the best of the first two or three was at an end on the first run.
# Those of `shared` are made of fine-tuned networks, so they have fine-tuning's.
recipe=${RECIPE:-quick} selection=last suffix= groups="main ours rest bits shared today"
everyday=finetune,affine-full,affine-centred
small=affine-simple,piggyback-bn
lora=lora-conv
if [ "$recipe" = standard ]; then
    selection=val suffix=-standard groups="everyday small lora shared today"
    tune=(--tune rate=1e-4,3e-4,1e-3 affine-centred:rate=3e-4,1e-3,3e-3,1e-2 lora-conv:rate=3e-4,1e-3,3e-3,1e-2)
    tune+=(affine-simple:rate=1e-4,3e-4,1e-3,3e-3 piggyback-bn:rate=1e-5,3e-5,1e-4,3e-4,1e-3)
    for method in bitdelta-row taps; do
        tune+=("$method:rate=1e-4,3e-4,1e-3")
    done
    tune+=(dora:rate=1e-3,3e-3,1e-2)
    for method in vera ssf bitfit; do
        tune+=("$method:rate=1e-3,3e-3,1e-2,3e-2")
    done
    tune+=(ftn:rate=3e-4,1e-3,3e-3,1e-2 tsa:rate=3e-4,1e-3,3e-3,1e-2 tsa:weight_rate=1e-5,3e-5,1e-4)  # its matrix by itself
    shared=tall-mask:rate=3e-4,emr:rate=3e-4
fi

sketch=(imagenet-to-sketch --data "$data/sketch-mini" --recipe "$recipe" --selection "$selection" --rate 5e-4 --weight-rate 1e-4
    --epochs 5 --limit 2048 --side 64)
decathlon=(decathlon --data "$data/decathlon-mini" --base resnet18-64
    --weights "$data/../weights/resnet18-tinyimagenet-64.safetensors" --recipe "$recipe" --selection "$selection" --rate 5e-4 --weight-rate 1e-4
    --norms own --epochs 6 --batch-size 16 --limit 1000 --side 32 --resized 36)

# run_groups OPTIONS…: all groups of methods, or those that the variable ONLY names; METHODS for some of a group's, SEEDS
# for other seeds than all.
run_groups() {
    for group in ${ONLY:-$groups}; do
        methods=$group tuned=$tuned_on seeds=${SEEDS:-0,1,2}
        case $group in rest | bits) seeds=0 ;; esac
        case $recipe-$group in quick-rest | quick-bits | quick-today) tuned=${tuned_on%%,*} ;; esac
        polymask benchmark "${common[@]}" --methods "${METHODS:-${!methods}}" --seeds "$seeds" "${tune[@]}" --tune-on "$tuned" "$@"
    done
}

case $run in
sketch)
    common=("${sketch[@]}" --classes cubs=100,stanford-cars=100 --orders down --out "results/sketch-mini-64$suffix")
    tuned_on=flowers,stanford-cars
    run_groups "$@"
    ;;
decathlon)
    common=("${decathlon[@]}" --orders down --out "results/decathlon-mini-32$suffix")
    tuned_on=gtsrb,vgg-flowers
    run_groups "$@"
    ;;
ablation-flowers)
    polymask benchmark "${sketch[@]}" --domains flowers --methods "$rows" --seeds 0,1 \
        --tune rate=1e-4,3e-4,1e-3 --out results/ablation-flowers "$@"
    ;;
ablation-gtsrb)
    polymask benchmark decathlon --data "$data/decathlon-mini" --recipe quick --weight-rate 1e-4 --base efficientnet-lite0 \
        --epochs 6 --batch-size 16 --limit 1000 --side 64 --domains gtsrb --methods "$rows" --seeds 0,1 \
        --tune rate=3e-4,1e-3 --out results/ablation-gtsrb "$@"
    ;;
*)
    echo "unknown run: $run" >&2
    exit 2
    ;;
esac
