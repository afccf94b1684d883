-- hpcllm for Lmod. The Tcl file beside it is for environment-modules, and says and does the same.
--
--     module use CLONE/modulefiles; module load hpcllm
--
-- The clone is found from this file's own place, so it can lie anywhere.

local root = myFileName():match("^(.*)/modulefiles/[^/]+/[^/]+$")
local version = myModuleVersion()

-- what jobscripts/local/setup.sh makes: .venv for the mpich wheel, else .venv-NAME; or an environment of your own
local mpi = os.getenv("HPCLLM_MPI") or "mpich"
local venv = os.getenv("HPCLLM_VENV") or pathJoin(root, mpi == "mpich" and ".venv" or ".venv-" .. mpi)
-- as it was loaded, whatever has been set since
if mode() == "unload" then venv = os.getenv("HPCLLM_PREFIX") or venv end
local is_installed = isFile(pathJoin(venv, "bin/hpcllm")) and not isFile(pathJoin(venv, "unfinished"))

whatis("Name: hpcllm")
whatis("Version: " .. version)
whatis("Category: machine learning")
whatis("Description: training code for large language models that is native to MPI")

help([[
hpcllm ]] .. version .. [[: training code for large language models that is native to MPI.

    hpcllm --help                                   the commands
    hpcllm memory RUN.toml --ranks 64               what each rank will hold, before anything is queued
    srun python -m hpcllm preflight RUN.toml        is this allocation fit to run?
    srun python -m hpcllm train RUN.toml            train, or go on where the run stopped
    bash "$HPCLLM_ROOT/jobscripts/local/train.sh"   a first run on this machine

Sets PATH (hpcllm, and the python that has it), HPCLLM_ROOT (the clone: README.md,
jobscripts/) and HPCLLM_PREFIX (the environment, from whose bin/ they come).
Takes HPCLLM_MPI=mpich (default), openmpi or system, as jobscripts/local/setup.sh does, or HPCLLM_VENV=FOLDER, a Python
environment of your own with hpcllm in it; set before loading.
Environment: ]] .. venv .. "\n")

family("hpcllm")

if mode() == "load" and not is_installed then
    LmodError("hpcllm is not installed in " .. venv .. ".\nInstall it, which takes some minutes, then load again:\n" ..
        "    HPCLLM_MPI=" .. mpi .. " bash '" .. pathJoin(root, "jobscripts/local/setup.sh") .. "'\n" ..
        "or name an environment that has it: export HPCLLM_VENV=FOLDER")
end

pushenv("HPCLLM_ROOT", root)
pushenv("HPCLLM_PREFIX", venv)
prepend_path("PATH", pathJoin(venv, "bin"))
