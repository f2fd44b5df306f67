#!/bin/sh
# Adult income through a PersiaJob in a kind cluster: needs docker, kind and kubectl. About ten minutes, most of
# them for images. The cluster is deleted at the end, unless KEEP=1.
set -eu
cd "$(dirname -- "$0")/../.."
cluster=persia-e2e
job=adult-income

cleanup() {
    status=$?
    if [ "$status" != 0 ]; then
        kubectl describe persiajobs || true
        kubectl get pods --output wide || true
        kubectl --namespace persia-system logs deployment/persia-operator --tail 100 || true
        kubectl logs "$job-nn-worker-0" --tail 100 || true
    fi
    [ "${KEEP:-0}" = 1 ] || kind delete cluster --name "$cluster"
    exit "$status"
}

docker build --target cpu --tag persiaml/persia-cpu-runtime:e2e .
docker build --target operator --tag persiaml/persia-k8s-operator:e2e .
kind create cluster --name "$cluster" --wait 120s
trap cleanup EXIT
kind load docker-image --name "$cluster" persiaml/persia-cpu-runtime:e2e persiaml/persia-k8s-operator:e2e

kubectl apply --server-side --kustomize k8s/deploy/base
kubectl --namespace persia-system set image deployment/persia-operator operator=persiaml/persia-k8s-operator:e2e
kubectl --namespace persia-system set env deployment/persia-operator PERSIA_CPU_IMAGE=persiaml/persia-cpu-runtime:e2e
kubectl --namespace persia-system rollout status deployment/persia-operator --timeout 120s

# One node: its provisioner knows volumes of one node only. The data is generated, as CI may have no way out.
sed -e 's/ReadWriteMany/ReadWriteOnce/' -e 's/:latest/:e2e/' -e 's#/data/adult]#/data/adult, --generate]#' \
    examples/adult_income/k8s/prepare-data.yaml | kubectl apply --filename -
kubectl wait --for condition=complete job/adult-income-data --timeout 300s
sed 's/restartPolicy: OnFailure/restartPolicy: OnFailure\n  imagePullPolicy: IfNotPresent/' \
    examples/adult_income/k8s/train-cpu.yaml | kubectl apply --filename -

deadline=$(($(date +%s) + 600))
while :; do
    phase=$(kubectl get persiajob "$job" --output jsonpath='{.status.phase}')
    case $phase in
    Succeeded) break ;;
    Failed) exit 1 ;;
    esac
    [ "$(date +%s)" -lt "$deadline" ] || exit 1
    sleep 5
done
kubectl delete persiajob "$job" --timeout 60s
[ -z "$(kubectl get pods --selector "persia_job=$job" --output name)" ] ||
    kubectl wait --for delete pod --selector "persia_job=$job" --timeout 120s
echo "adult income: Succeeded"
